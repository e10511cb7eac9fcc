"""The trainer's Prometheus endpoint, read back by Prometheus's own client."""

import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.errors import PenstockError
from penstock.obs.metric_names import TRAINING, training_metric
from penstock.obs.sinks.prometheus import PrometheusEndpoint


def endpoint(port=0, host="127.0.0.1"):
    return PrometheusEndpoint(host, port, run="first", steps=100, checkpoint_every=10)


def scrape(sink):
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "run")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels["run"] == "first"
    }


def test_the_newest_value_of_every_metric_is_served():
    with endpoint() as sink:
        sink({"event": "start", "step": 0, "ranks": 2, "time": "now"})
        sink(
            {"step": 1, "loss": 6.0, "step_s": 0.5, "tokens_per_s": 10.0, "corpus_tokens": {"web": 1, "b": 2}}
        )
        sink({"step": 1, "validation_loss": 7.0, "corpus_perplexity": {"web": None}})
        sink(
            {"step": 2, "loss": 5.0, "step_s": 0.5, "tokens_per_s": 20.0, "corpus_tokens": {"web": 4, "b": 2}}
        )
        found = scrape(sink)
    assert found["penstock_train_step",] == 2
    assert found["penstock_train_loss",] == 5.0
    assert found["penstock_train_validation_loss",] == 7.0
    assert found["penstock_train_step_seconds",] == 0.5
    assert found["penstock_train_tokens_per_second",] == 20.0
    assert found["penstock_train_corpus_tokens", "web"] == 4
    assert found["penstock_train_steps_wanted",] == 100
    assert found["penstock_train_checkpoint_every",] == 10
    assert {name.removesuffix("_total") for name, *_ in found} <= set(TRAINING)


def test_skipped_steps_are_counted_and_keep_the_last_loss():
    with endpoint() as sink:
        sink({"step": 1, "loss": 6.0})
        sink({"event": "skipped", "step": 2, "why": "nan", "is_finite": False})
        sink({"event": "skipped", "step": 3, "why": "a jump", "is_finite": True})
        found = scrape(sink)
    assert found["penstock_train_skipped_steps_total",] == 2
    assert found["penstock_train_steps_not_finite_total",] == 1
    assert (found["penstock_train_step",], found["penstock_train_loss",]) == (3, 6.0)


def test_events_move_the_time_of_the_last_record_and_nothing_else(monkeypatch):
    times = iter([100.0, 200.0])
    monkeypatch.setattr("penstock.core.clock.unix_seconds", lambda: next(times))
    with endpoint() as sink:
        assert scrape(sink)["penstock_train_last_record_timestamp_seconds",] == 100.0
        sink({"event": "traffic", "step": 1, "loss": 1e9})
        found = scrape(sink)
    assert found["penstock_train_last_record_timestamp_seconds",] == 200.0
    assert ("penstock_train_loss",) not in found


def test_a_closed_endpoint_is_gone_and_its_port_is_free_again():
    with endpoint() as sink:
        port = sink.port
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
    with endpoint(port):
        pass


def test_a_port_in_use_and_a_foreign_address_are_refused_with_what_to_set():
    with endpoint() as sink, pytest.raises(PenstockError, match=r"in use .*Set it to a free port") as refused:
        endpoint(sink.port)
    assert str(sink.port) in str(refused.value)
    with pytest.raises(PenstockError, match=r"at 192\.0\.2\.1: .*measure\.metrics_host"):
        endpoint(host="192.0.2.1")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(PenstockError, match=r"not installed.*penstock\[monitor\].*metrics_port to 0"):
        endpoint()


def test_units_are_spelled_as_prometheus_asks():
    assert training_metric("checkpoint_s") == "penstock_train_checkpoint_seconds"

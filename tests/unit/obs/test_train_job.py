"""Reports of progress to the controller of a TrainJob: an HTTPS server of the published contract."""

import time
from dataclasses import replace

import pytest

from penstock.obs.sinks.train_job import TrainJobStatus, trainer_status
from tests.status_server import status_server


@pytest.fixture
def server(tmp_path):
    with status_server(tmp_path / "pod") as found:
        yield found


def step(number, **values):
    return {"step": number, "tokens": 10 * number, "loss": 7.0 - number, "tokens_per_s": 100.0, **values}


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_arrives_is_the_progress_of_the_run(server):
    controller, told = server
    with TrainJobStatus(told, steps=4, every_s=0.0) as sink:
        for number in range(1, 5):
            sink({"event": "traffic", "step": number})
            sink(step(number))
            wait_for(lambda number=number: len(controller.reports) == number)
        sink({"step": 4, "validation_loss": 2.5})
    first, *_, last = controller.reports
    assert first["progressPercentage"] == 25
    assert "estimatedRemainingSeconds" not in first
    assert controller.reports[1]["estimatedRemainingSeconds"] >= 0
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert metrics == {
        "loss": "3",
        "tokens_per_second": "100",
        "validation_loss": "2.5",
        "tokens": "40",
        "step": "4",
    }
    assert set(controller.seen) == {200}


def test_while_the_controller_hangs_no_step_waits_and_one_report_does(server):
    controller, told = server
    controller.hangs.set()
    sink = TrainJobStatus(told, steps=2000, every_s=0.0)
    with sink:
        sink(step(1))
        assert controller.asked.wait(60)
        spent = time.thread_time()
        for number in range(2, 1002):  # each is put in the place of the one before
            sink(step(number))
        assert time.thread_time() - spent < 10
        assert sink.sent == 0
        assert sink.dropped == 999
        controller.hangs.clear()
        controller.released.set()
    assert sink.sent <= 1  # the last one, or none if the pause was cut


def test_a_new_token_is_read_for_the_next_report(server):
    controller, told = server
    with TrainJobStatus(told, steps=4, every_s=0.0) as sink:
        sink(step(1))
        wait_for(lambda: controller.reports)
        controller.token = "second-token"
        told.token_file.write_text("second-token")
        sink(step(2))
        wait_for(lambda: len(controller.reports) == 2)
    assert set(controller.seen) == {200}


def test_too_many_requests_are_followed_by_the_pause_that_was_asked_for(server):
    controller, told = server
    controller.answers = [(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})]
    with TrainJobStatus(told, steps=4, every_s=0.0) as sink:
        sink(step(1))
        wait_for(lambda: controller.reports)
    assert controller.seen[:3] == [429, 503, 200]
    assert controller.reports[0]["progressPercentage"] == 25
    assert sink.dropped == 0


def test_a_long_pause_ends_with_the_run(server):
    controller, told = server
    controller.answers = [(429, {"Retry-After": "3600"})]
    with TrainJobStatus(told, steps=4, every_s=0.0) as sink:
        sink(step(1))
        wait_for(lambda: controller.seen)
    assert controller.seen == [429, 200]
    assert (sink.sent, sink.dropped) == (1, 1)


@pytest.mark.parametrize("status", [302, 401, 403, 404, 422])
def test_a_refusal_is_said_once_and_drops_the_report(server, caplog, status):
    controller, told = server
    controller.answers = [(status, {"Location": "https://elsewhere.invalid"})]
    with TrainJobStatus(told, steps=4, every_s=0.0) as sink:
        sink(step(1))
        wait_for(lambda: sink.dropped == 1)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [f"HTTP status {status}" in record.getMessage() for record in warnings] == [True]
    assert "first-token" not in caplog.text


@pytest.mark.parametrize("change", ["url", "ca_file", "token_file", "certificate"])
def test_what_cannot_be_reached_or_trusted_costs_reports_only(server, tmp_path, caplog, change):
    controller, told = server
    missing = tmp_path / "missing"
    if change == "url":
        told = replace(told, url=told.url.replace("https", "http"))
    elif change == "certificate":
        with status_server(tmp_path / "other") as (_, other):
            told = replace(told, ca_file=other.ca_file)
    else:
        told = replace(told, **{change: missing})
    with TrainJobStatus(told, steps=4, every_s=0.0) as sink:
        sink(step(1))
        wait_for(lambda: "could not be reported" in caplog.text)
    assert sink.sent == 0
    assert not controller.reports


def test_reports_are_at_most_so_many_seconds_apart_and_the_last_step_is_always_told(server, monkeypatch):
    controller, told = server
    monkeypatch.setattr("penstock.core.clock.monotonic", lambda: 5.0)
    with TrainJobStatus(told, steps=9) as sink:
        for number in range(1, 10):
            sink(step(number))
            if number == 1:
                wait_for(lambda: controller.reports)
    assert [report["progressPercentage"] for report in controller.reports][-1] == 100
    assert len(controller.reports) <= 3
    assert sink.sent + sink.dropped <= 3


def test_numbers_fit_the_fields_of_the_contract():
    body = trainer_status(
        {"step": 1, "loss": float("nan")}, steps=10**9, left_s=1e12, at="2026-11-23T10:00:00Z"
    )
    assert body["trainerStatus"]["progressPercentage"] == 0
    assert body["trainerStatus"]["estimatedRemainingSeconds"] == 2**31 - 1
    assert body["trainerStatus"]["metrics"][0] == {"name": "loss", "value": "nan"}

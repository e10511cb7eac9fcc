"""Prometheus endpoint of a training run: serves the newest record at `/metrics`, from threads of its own.

A record costs the training thread a merge of two small dicts. Everything else happens at a scrape, in a
thread of the server.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.obs.metric_names import BY_CORPUS, BY_TASK, METRICS, TRAINING, training_metric
from penstock.obs.sinks import Record

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class PrometheusEndpoint:
    """Sink that serves metrics over HTTP until it is closed; use as a context manager.

    Args:
        host: address to listen on.
        port: TCP port; 0: any free one.
        run: name of the run, the label `run` of every metric.
        steps: steps of the whole run.
        checkpoint_every: steps between checkpoints.

    Raises:
        PenstockError: the package is not installed, or the port cannot be opened.
    """

    def __init__(self, host: str, port: int, *, run: str, steps: int, checkpoint_every: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise PenstockError(
                "measure.metrics_port needs the package prometheus-client, which is not installed",
                fix="pip install 'penstock[monitor]', or set measure.metrics_port to 0.",
            ) from None
        self._run = run
        self._latest: Record = {}
        """Newest value of each metric. Replaced, never altered: other threads read it."""
        self._constants = {
            "penstock_train_steps_wanted": float(steps),
            "penstock_train_checkpoint_every": float(checkpoint_every),
        }
        self._last_record = clock.unix_seconds()
        self._skipped = self._not_finite = 0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise PenstockError(
                f"measure.metrics_port cannot be opened at {host}: {error.strerror or error}",
                got=port,
                fix="Set it to a free port and measure.metrics_host to an address of this machine, or set "
                "measure.metrics_port to 0.",
            ) from error

    @property
    def port(self) -> int:
        """TCP port of the endpoint."""
        return int(self._server.server_port)

    def __call__(self, record: Record) -> None:
        """Take the values of a record."""
        event = record.get("event")
        if event == "skipped":
            self._skipped += 1
            self._not_finite += not record.get("is_finite", True)
            record = {"step": record["step"]}
        if event in (None, "skipped"):
            self._latest = self._latest | record
        self._last_record = clock.unix_seconds()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> Iterator["Metric"]:
        """Return nothing: metrics appear with their first value."""
        return iter(())

    def collect(self) -> Iterator["Metric"]:
        """Return every metric that has a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        record = self._latest
        gauges = self._constants | {
            "penstock_train_last_record_timestamp_seconds": self._last_record,
            **{training_metric(name): record[name] for name in METRICS if _is_number(record.get(name))},
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(name, TRAINING[name][1], labels=("run",))
            gauge.add_metric((self._run,), value)
            yield gauge
        for metric in (*BY_CORPUS, *BY_TASK):
            if values := record.get(metric):
                name = training_metric(metric)
                label = "corpus" if metric in BY_CORPUS else "task"
                gauge = GaugeMetricFamily(name, TRAINING[name][1], labels=("run", label))
                for key, value in values.items():
                    gauge.add_metric((self._run, key), math.nan if value is None else value)
                yield gauge
        for name, count in (
            ("penstock_train_skipped_steps", self._skipped),
            ("penstock_train_steps_not_finite", self._not_finite),
        ):
            counter = CounterMetricFamily(name, TRAINING[name][1], labels=("run",))
            counter.add_metric((self._run,), count)
            yield counter


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)

"""Doctor as a daemon: runs the checks at intervals, publishes the findings, sets the condition of its node.

Each check is a process of its own, `penstock doctor --json`, so that this one holds no memory of a GPU
between them, and outlives a check that hangs or crashes. In between it listens for Xid errors.
"""

import http.client
import json
import logging
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core import clock
from penstock.core.env import ClusterApi
from penstock.core.errors import PackageMissing, PenstockError
from penstock.core.pod_https import Credentials, Refused
from penstock.doctor.checks.check import Finding, Level, worst
from penstock.doctor.node_condition import CREDENTIALS, set_condition
from penstock.doctor.xid import XidListener, judge
from penstock.obs.metric_names import NODE

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0  # of all checks together
_KILLED_S = 10.0  # for checks that were killed to be gone
_LOOK_S = 0.2  # between looks whether to stop
_GPU_METRICS = {
    "penstock_node_gpu_uncorrected_errors": "uncorrected_errors",
    "penstock_node_gpu_corrected_errors": "corrected_errors",
    "penstock_node_gpu_remapped_rows": "remapped_rows",
    "penstock_node_gpu_throttle_bits": "throttle_bits",
}
"""Metric -> field of checks/gpus.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """Result of one round of checks."""

    findings: Sequence[Finding] | None
    """None: the checks could not run."""
    gpus: Sequence[dict[str, Any]] = ()
    """GPUs with the fields of checks/gpus.py. Any: JSON."""
    seconds: float = 0.0
    at: float = 0.0
    """Unix time of its end."""


def run_checks(
    words: Sequence[str], *, is_stopped: Callable[[], bool], timeout_s: float = _TIMEOUT_S
) -> CheckedNode:
    """Run `penstock doctor --json` once with some options, at most until the time limit or a stop."""
    start = clock.monotonic()
    command = [sys.executable, "-m", "penstock", "doctor", "--json", *words]
    findings: list[Finding] | None = None
    gpus: list[dict[str, Any]] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, errors, killed_at = "", "", math.inf
    while True:
        try:
            out, errors = process.communicate(timeout=_LOOK_S)
            break
        except subprocess.TimeoutExpired:
            now = clock.monotonic()
            if now - killed_at > _KILLED_S:  # in a driver's call that no signal ends: the node is not checked
                errors = "the checks hang, and cannot be killed"
                break
            if math.isinf(killed_at) and (is_stopped() or now - start > timeout_s):
                killed_at = now
                process.kill()
    try:
        report = json.loads(out)
        findings = [
            Finding(**{**raw, "level": Level(raw["level"]), "nodes": ()}) for raw in report["findings"]
        ]
        gpus = report["gpus"]
    except (ValueError, KeyError, TypeError):
        log.error("the checks did not run: exit=%s %s", process.returncode, errors.strip()[-1000:])
    return CheckedNode(
        findings=findings, gpus=gpus, seconds=clock.monotonic() - start, at=clock.unix_seconds()
    )


class NodeMetrics:
    """Collector of the newest result, for prometheus-client."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.latest: CheckedNode | None = None
        """Newest result. Replaced, never altered: the threads of the endpoint read it."""
        self.xids: XidListener | None = None

    def describe(self) -> Iterator["Metric"]:
        """Return nothing: metrics appear with the first result."""
        return iter(())

    def collect(self) -> Iterator["Metric"]:
        """Return the metrics of the newest result; none before the first."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, NODE[name][1], labels=("node", *labels))

        if (result := self.latest) is None:
            return
        is_healthy = result.findings is not None and worst(result.findings) is not Level.RED
        for name, value in (
            ("penstock_node_healthy", float(is_healthy)),
            ("penstock_node_checked_timestamp_seconds", result.at),
            ("penstock_node_check_seconds", result.seconds),
        ):
            metric = gauge(name)
            metric.add_metric((self._node,), value)
            yield metric
        metric = gauge("penstock_node_findings", "check", "level")
        counts = Counter((found.check, str(found.level)) for found in result.findings or ())
        for (check, level), count in counts.items():
            metric.add_metric((self._node, check, level), count)
        yield metric
        for name, field in _GPU_METRICS.items():
            metric = gauge(name, "gpu")
            for gpu in result.gpus:
                if gpu[field] is not None:
                    metric.add_metric((self._node, gpu["bus"]), gpu[field])
            yield metric
        counter = CounterMetricFamily(
            "penstock_node_xid", NODE["penstock_node_xid"][1], labels=("node", "gpu", "xid")
        )
        for (bus, number), count in (self.xids.seen() if self.xids else {}).items():
            counter.add_metric((self._node, bus, str(number)), count)
        yield counter


def run(
    words: Sequence[str],
    *,
    every_s: float,
    host: str,
    port: int | None,
    node: str,
    api: ClusterApi | None,
    credentials: Credentials = CREDENTIALS,
    is_stopped: Callable[[], bool],
) -> None:
    """Check until `is_stopped` returns True.

    Args:
        words: options of the checks.
        every_s: seconds from the beginning of a round of checks to that of the next.
        host: address of the metrics.
        port: TCP port of the metrics; None: they are not served.
        node: name in the metrics.
        api: where the node's condition is set; None: nowhere.
        credentials: files of the pod for that.

    Raises:
        PenstockError: the port cannot be opened, or prometheus-client is not installed.
    """
    metrics = NodeMetrics(node)
    server = None if port is None else _serve(metrics, host, port)
    try:
        with XidListener() as xids:
            metrics.xids = xids
            while not is_stopped():
                began = clock.monotonic()
                result = run_checks(words, is_stopped=is_stopped)
                if is_stopped():
                    return
                if result.findings is not None:
                    seen = [*result.findings, *judge(xids.seen())]
                    result = CheckedNode(
                        findings=seen, gpus=result.gpus, seconds=result.seconds, at=result.at
                    )
                metrics.latest = result
                _log(result)
                if api is not None:
                    _tell(api, result, credentials)
                while not is_stopped() and clock.monotonic() - began < every_s:
                    clock.sleep(_LOOK_S)
    finally:
        if server is not None:
            server.close()


class _Server:
    """HTTP server of the metrics with its thread."""

    def __init__(self, metrics: NodeMetrics, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(metrics)
        self._server, self._thread = start_http_server(port, host, registry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _serve(metrics: NodeMetrics, host: str, port: int) -> _Server:
    try:
        return _Server(metrics, host, port)
    except ImportError:
        raise PackageMissing(
            "--metrics-port needs the package prometheus-client, which is not installed",
            fix="pip install 'penstock[monitor]', or leave --metrics-port out.",
        ) from None
    except OSError as error:
        raise PenstockError(
            f"--metrics-port cannot be opened at {host}: {error.strerror or error}",
            got=port,
            fix="Take a free port, and for --metrics-host an address of this machine.",
        ) from error


def _tell(api: ClusterApi, result: CheckedNode, credentials: Credentials) -> None:
    """Set the node's condition; a failure is logged, and tried again after the next check."""
    try:
        condition = set_condition(api, result.findings, now=clock.utc_now(), credentials=credentials)
    except (OSError, ValueError, http.client.HTTPException, Refused) as error:
        said = error.body.decode(errors="replace")[:500] if isinstance(error, Refused) else ""
        log.error("the condition of node=%s was not set: %s %s", api.node, error, said)
    else:
        log.info("node=%s %s=%s", api.node, condition["type"], condition["status"])


def _log(result: CheckedNode) -> None:
    for finding in result.findings or ():
        if finding.level is not Level.GREEN:
            log.warning("%s %s: %s. %s", finding.level, finding.check, finding.what, finding.remedy)
    if result.findings is not None:
        log.info("checked level=%s seconds=%.1f", worst(result.findings), result.seconds)

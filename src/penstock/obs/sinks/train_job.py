"""Progress of a Kubeflow TrainJob: reports per cent done, seconds left and metrics to its controller.

The contract is that of Kubeflow Trainer 2.2 and later behind its gate `TrainJobStatus` (KEP-2779): a POST of
`{"trainerStatus": ...}` with a bearer token to an HTTPS address, both given by environment variables. The
controller writes it to `status.trainerStatus` of the TrainJob.

    training thread | record -> [ one report waits ] |
    thread          |                                | -> POST, pause, POST ...

The training thread only puts a report in the place of the waiting one, which is then dropped and counted. A
controller that hangs or refuses costs reports, never a step.
"""

import http.client
import json
import math
from threading import Condition, Thread
from typing import Any, Self

from penstock.core import clock
from penstock.core.env import StatusServer
from penstock.core.log import EventLog
from penstock.core.pod_https import Credentials, Refused, send
from penstock.obs.sinks import Record
from penstock.obs.time_left import TimeLeft

log = EventLog(__name__)

_EVERY_S = 10.0  # the Kubeflow SDK reports every 5 s at most
_LAST_S = 5.0  # time for the last report when the run ends
_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 300.0  # after a failure, doubled at each further one
_MAX_SECONDS = 2**31 - 1  # the field is an int32
_METRICS = {
    "loss": "loss",
    "tokens_per_s": "tokens_per_second",
    "validation_loss": "validation_loss",
    "tokens": "tokens",
    "step": "step",
}
"""Metric of a record -> name in the report."""


def trainer_status(record: Record, *, steps: int, left_s: float | None, at: str) -> dict[str, Any]:
    """Return the body of a report.

    Args:
        record: newest values by the names of obs/metric_names.py; has `step`.
        steps: steps of the whole run.
        left_s: seconds left; None: unknown.
        at: time of the record, RFC 3339.

    >>> body = trainer_status({"step": 499, "loss": 2.25}, steps=1000, left_s=80.4, at="2026-11-23T10:00:00Z")
    >>> body["trainerStatus"]["progressPercentage"], body["trainerStatus"]["estimatedRemainingSeconds"]
    (49, 81)
    >>> body["trainerStatus"]["metrics"]
    [{'name': 'loss', 'value': '2.25'}, {'name': 'step', 'value': '499'}]
    """
    status: dict[str, Any] = {"progressPercentage": min(100, 100 * record["step"] // steps)}
    if left_s is not None:
        status["estimatedRemainingSeconds"] = min(math.ceil(left_s), _MAX_SECONDS)
    status["metrics"] = [
        {
            "name": spelled,
            "value": f"{record[name]:.6g}" if isinstance(record[name], float) else str(record[name]),
        }
        for name, spelled in _METRICS.items()
        if name in record
    ]
    status["lastUpdatedTime"] = at
    return {"trainerStatus": status}


class TrainJobStatus:
    """Sink that reports to the controller of a TrainJob; use as a context manager.

    Args:
        server: address and credentials.
        steps: steps of the whole run.
        every_s: least seconds between two reports.
    """

    def __init__(self, server: StatusServer, *, steps: int, every_s: float = _EVERY_S) -> None:
        self._server, self._steps, self._every_s = server, steps, every_s
        self._time_left = TimeLeft(steps=steps)
        self._latest: Record = {}
        self._left_s: float | None = None
        self._offered_s = -math.inf
        self._changed = Condition()
        self._waiting: dict[str, Any] | None = None
        self._is_closing = False
        self._failures = 0
        """Failures since the last report that was taken."""
        self.sent = 0
        """Reports taken by the controller."""
        self.dropped = 0
        """Reports that were not sent: a newer one took their place, or the controller refused them."""
        self._thread = Thread(target=self._report, name="trainjob-status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __call__(self, record: Record) -> None:
        """Take the values of a record; offer a report if one is due."""
        if "event" in record:
            return
        now = clock.monotonic()
        self._latest = self._latest | record
        if "loss" in record:
            self._left_s = self._time_left.after(record["step"], now=now)
        if now - self._offered_s >= self._every_s or record["step"] == self._steps:
            self._offered_s = now
            self._offer()

    def __exit__(self, *_: object) -> None:
        """Send the last report, if the controller takes it in time."""
        if self._latest:
            self._offer()
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_LAST_S)
        log.info(
            "trainjob_reports",
            "Sent {sent:#report} of the TrainJob status, dropped {dropped}",
            sent=self.sent,
            dropped=self.dropped,
        )

    def _offer(self) -> None:
        report = trainer_status(self._latest, steps=self._steps, left_s=self._left_s, at=clock.utc_now())
        with self._changed:
            self.dropped += self._waiting is not None
            self._waiting = report
            self._changed.notify()

    def _report(self) -> None:
        """Send reports until the sink is closed: the body of the thread."""
        while (report := self._next()) is not None:
            pause_s = self._deliver(report)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, pause_s)

    def _next(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closing)
            report, self._waiting = self._waiting, None
            return report

    def _deliver(self, report: dict[str, Any]) -> float:
        """Send a report; return the seconds to wait before the next."""
        try:
            send(
                "POST",
                self._server.url,
                json.dumps(report).encode(),
                Credentials(ca_file=self._server.ca_file, token_file=self._server.token_file),
                content_type="application/json",
            )
        except (OSError, ValueError, http.client.HTTPException, Refused) as error:
            return self._failed(report, error)
        self.sent += 1
        self._failures = 0
        return 0.0

    def _failed(self, report: dict[str, Any], error: Exception) -> float:
        """Keep a report for another try, if that may help and there is none newer; return the pause."""
        may_pass = not isinstance(error, Refused) or error.is_passing
        with self._changed:
            if may_pass and self._waiting is None and not self._is_closing:
                self._waiting = report
            else:
                self.dropped += 1
        if not self._failures:
            log.warning(
                "trainjob_unreported",
                "The TrainJob status could not be reported to {url}: {error}",
                url=self._server.url,
                error=error,
            )
        self._failures += 1
        pause_s = min(_PAUSE_S * 2 ** (self._failures - 1), _LONGEST_PAUSE_S)
        asked_s = error.retry_after_s if isinstance(error, Refused) else None
        return pause_s if asked_s is None else min(asked_s, _LONGEST_PAUSE_S)

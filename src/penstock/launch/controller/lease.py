"""Leader election by a Lease of Kubernetes: of several replicas of the operator one acts.

A replica that finds the lease unchanged for its whole duration takes it. What counts is how long *this*
replica has seen no change, by its own clock, so clocks of nodes need not agree. A lease is written with the
version that was read, so of two that take it at once one is refused.

A replica leads for 0.8 of the duration, counted from *before* the request that took or renewed the lease. A
thread of its own watches this, so that requests that hang end the lead in time. One does not: it is given up
after a fifth of the duration, and sent again.
"""

import math
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.core.log import EventLog
from penstock.launch.engines.kubernetes_api import ClusterConnection

NAME = "penstock-operator"
_API, _KIND = "coordination.k8s.io/v1", "Lease"
_SHARE_LED = 0.8
_AGAIN_AFTER = 1 / 20
"""Share of the duration to wait after a renewal that failed."""
_MAX_CONFLICTS = 3
_log = EventLog("penstock.operator")


def answer_s(duration_s: float) -> float:
    """Return the seconds after which a request for a lease is given up, so that others fit into the lead."""
    return duration_s / 5


class LeaderLease:
    """A lease that is held by one replica at a time.

    Args:
        identity: name of this replica, different from all others.
        duration_s: seconds after which the lease of a replica that is gone is taken.
        connect: returns a connection to the cluster, which gives a request up after `answer_s(duration_s)`.
    """

    def __init__(self, identity: str, duration_s: float, connect: Callable[[], ClusterConnection]) -> None:
        self._identity, self._duration_s, self._connect = identity, duration_s, connect
        self._version, self._seen_at = "", clock.monotonic()
        self._held_since = -duration_s
        """When the request was sent that last took or renewed the lease."""
        self._ended = threading.Event()
        self._renewal: threading.Thread | None = None

    def acquire(self, stopped: threading.Event) -> bool:
        """Wait until this replica leads; False: `stopped` was set before."""
        said = ""
        while not stopped.is_set():
            try:
                if self.take():
                    return True
            except PenstockError as error:  # the API server is away, or the replica lacks a right
                if str(error) != said:
                    said = str(error)
                    _log.warning(
                        "lease_untaken",
                        "The lease cannot be taken, and is tried again: {error}",
                        error=said,
                    )
            stopped.wait(self._duration_s / 5)
        return False

    def take(self) -> bool:
        """Take or renew the lease; False: another replica has it."""
        sent_at = clock.monotonic()
        is_taken = self._take()
        if is_taken:
            self._held_since = sent_at
        return is_taken

    def _take(self) -> bool:
        cluster = self._connect()
        for _ in range(_MAX_CONFLICTS):
            found = cluster.get(_API, _KIND, NAME)
            if found is None:
                is_written = cluster.create(self._object({}, {}))
            else:
                spec, version = dict(found["spec"]), str(found["metadata"]["resourceVersion"])
                if self._is_of_another(spec, version):
                    return False
                is_written = cluster.replace(self._object(spec, {"resourceVersion": version}))
            if is_written:
                return True
            # Written in between: by another replica, or by a request of ours that was given up.
        raise PenstockError(
            f"Lease {NAME} was written by others {_MAX_CONFLICTS} times in a row",
            fix="Look for another operator that uses it.",
        )

    def _is_of_another(self, spec: dict[str, Any], version: str) -> bool:  # Any: JSON
        """True if another replica has the lease, and was not gone for its duration."""
        if version != self._version:
            self._version, self._seen_at = version, clock.monotonic()
        is_old = clock.monotonic() - self._seen_at > float(spec.get("leaseDurationSeconds") or 0)
        return (spec.get("holderIdentity") or "") not in ("", self._identity) and not is_old

    def keep(self, on_lost: Callable[[str], None]) -> None:
        """Renew the lease in a thread until `stop`.

        Args:
            on_lost: called once with the reason, in a thread, when another replica has the lease or may
                soon take it.
        """
        once = threading.Lock()

        def lose(why: str) -> None:
            if not self._ended.is_set() and once.acquire(blocking=False):
                on_lost(why)

        self._renewal = threading.Thread(target=self._renew, args=(lose,), name="lease", daemon=True)
        self._renewal.start()
        threading.Thread(target=self._watch, args=(lose,), name="lease-deadline", daemon=True).start()

    def _renew(self, lose: Callable[[str], None]) -> None:
        wait_s = self._duration_s / 5
        while not self._ended.wait(wait_s):
            wait_s = self._duration_s / 5
            try:
                if not self.take():
                    return lose("another replica leads")
            except PenstockError as error:  # `_watch` ends the lead in time
                _log.warning("lease_unrenewed", "The lease was not renewed: {error}", error=error)
                wait_s = self._duration_s * _AGAIN_AFTER
            except Exception:
                _log.exception("lease_failed", "The lease cannot be renewed")
                return lose("it cannot be renewed")
        return None

    def _watch(self, lose: Callable[[str], None]) -> None:
        while (left := self._held_since + _SHARE_LED * self._duration_s - clock.monotonic()) > 0:
            if self._ended.wait(left):
                return
        age_s = clock.monotonic() - self._held_since
        lose(
            f"the API server renewed it last {age_s:.1f} s ago, and another replica may take it after "
            f"{self._duration_s:g} s"
        )

    def stop(self) -> None:
        """Stop renewing: this replica does nothing more."""
        self._ended.set()
        if self._renewal is not None:
            self._renewal.join(self._duration_s)  # a request that hangs ends with the process

    def give_back(self) -> None:
        """Let another replica lead at once."""
        cluster = self._connect()
        found = cluster.get(_API, _KIND, NAME)
        if found is not None and found["spec"].get("holderIdentity") == self._identity:
            spec, version = dict(found["spec"]), str(found["metadata"]["resourceVersion"])
            freed = self._object(spec, {"resourceVersion": version})
            freed["spec"]["holderIdentity"] = ""
            cluster.replace(freed)

    def _object(self, before: dict[str, Any], meta: dict[str, str]) -> dict[str, Any]:  # Any: JSON
        now = datetime.fromtimestamp(clock.unix_seconds(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changed = before.get("holderIdentity") != self._identity
        return {
            "apiVersion": _API,
            "kind": _KIND,
            "metadata": {"name": NAME, **meta},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": math.ceil(self._duration_s),
                "acquireTime": now if changed else before.get("acquireTime", now),
                "renewTime": now,
                "leaseTransitions": int(before.get("leaseTransitions") or 0) + changed,
            },
        }

"""The operator's process: waits until it leads, then reconciles every TrainingRun of a namespace, in turn.

One thread lists the runs every few seconds, holds each by a finalizer, and takes one step for it; what that
is is in reconcile.py. The lease has threads of its own, so that a reconciliation that hangs ends the lead in
time. A leader that loses its lease ends at once, and is started again by its Deployment.
"""

import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.core.log import EventLog
from penstock.launch.controller.lease import LeaderLease, answer_s
from penstock.launch.controller.reconcile import API, GROUP, KIND, Planner, Reconciler
from penstock.launch.engines.kubernetes_api import ANSWER_S, ClusterConnection, connect

FINALIZER = f"{GROUP}/operator"
"""Holds a TrainingRun that is deleted until its pods have saved and are gone."""
_RECONNECT_S = 600.0  # tokens of service accounts are renewed by the kubelet
_log = EventLog("penstock.operator")


def run_operator(namespace: str, plan: Planner, *, identity: str, every_s: float, lease_s: float) -> int:
    """Run until a signal; return the exit code: 0 stopped, 1 the lease was lost.

    Args:
        namespace: of the TrainingRuns and of the lease.
        identity: name of this replica.
        every_s: seconds between two reconciliations of a run.
        lease_s: seconds until the lease of a replica that is gone is taken.
    """
    connection = _Connection(namespace)
    connection.get()  # raises before anything waits
    lease = LeaderLease(identity, lease_s, _Connection(namespace, answer_s(lease_s)).get)
    stopped = threading.Event()

    def stop(_number: int, _frame: object) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    _log.info(
        "waiting",
        "Replica {replica} waits to lead in namespace {namespace}",
        replica=identity,
        namespace=namespace,
    )
    if not lease.acquire(stopped):
        return 0
    _log.info(
        "leading",
        "Replica {replica} leads in namespace {namespace}",
        replica=identity,
        namespace=namespace,
    )
    lease.keep(_leave)
    try:
        _look_until(stopped, connection, plan, every_s)
    finally:
        lease.stop()
        with suppress(PenstockError):  # it runs out by itself
            lease.give_back()
    return 0


def _look_until(stopped: threading.Event, connection: "_Connection", plan: Planner, every_s: float) -> None:
    said = ""
    while not stopped.is_set():
        began = clock.monotonic()
        try:
            reconcile_all(connection.get(), plan, stopped)
            said = ""
        except PenstockError as error:  # the API server is away, or refuses
            if str(error) != said:
                said = str(error)
                _log.warning(
                    "runs_unlisted", "The runs cannot be listed, and are tried again: {error}", error=said
                )
        stopped.wait(max(0.0, began + every_s - clock.monotonic()))


def _leave(why: str) -> None:
    _log.error("lease_lost", "The lease was lost: {reason}", reason=why)
    logging.shutdown()
    os._exit(1)  # at once, so that no two act


class _Connection:
    """A connection that is made again now and then, with the token that the pod then has."""

    def __init__(self, namespace: str, answer_s: float = ANSWER_S) -> None:
        self._namespace, self._answer_s, self._lock = namespace, answer_s, threading.Lock()
        self._found: ClusterConnection | None = None
        self._made_at = -_RECONNECT_S

    def get(self) -> ClusterConnection:
        with self._lock:
            now = clock.monotonic()
            if self._found is None or now - self._made_at > _RECONNECT_S:
                self._found, self._made_at = connect(self._namespace, answer_s=self._answer_s), now
            return self._found


def reconcile_all(cluster: ClusterConnection, plan: Planner, stopped: threading.Event) -> None:
    """Reconcile each TrainingRun of the namespace; an error in one does not affect the others.

    Raises:
        PenstockError: the API server does not list them.
    """
    for run in cluster.all(API, KIND):
        if stopped.is_set():
            return
        name = run["metadata"]["name"]
        try:
            reconcile_run(cluster, plan, run)
        except PenstockError as error:
            _log.warning("run_failed", "Run {run}: {error}", run=name, error=error)
        except Exception:  # the next time may succeed; other runs must not wait for that
            _log.exception("run_failed", "Run {run} could not be reconciled", run=name)


def reconcile_run(cluster: ClusterConnection, plan: Planner, run: Mapping[str, Any]) -> None:  # Any: JSON
    """Hold a run by the operator's finalizer while anything of it is left, and take one step for it."""
    meta = run["metadata"]
    held = list(meta.get("finalizers") or [])
    if "deletionTimestamp" not in meta and FINALIZER not in held:
        _set_finalizers(cluster, meta, [*held, FINALIZER])
    is_there = Reconciler(cluster, plan).reconcile(meta["name"])
    if "deletionTimestamp" in meta and not is_there and FINALIZER in held:
        _set_finalizers(cluster, meta, [one for one in held if one != FINALIZER])


def _set_finalizers(cluster: ClusterConnection, meta: Mapping[str, Any], names: list[str]) -> None:
    """Change the finalizers of a run; if it was changed since it was listed, the next time tries again."""
    change = {"metadata": {"finalizers": names, "resourceVersion": meta["resourceVersion"]}}
    cluster.merge(API, KIND, meta["name"], change)

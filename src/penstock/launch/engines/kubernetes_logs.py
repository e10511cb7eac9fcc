"""Logs of a run's pods: lines of a rank, also from pods that start later, and the run's progress."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, Queue
from threading import Thread
from typing import Any

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.launch.engines.engine import EngineUnreachable
from penstock.launch.engines.kubernetes_api import LogBrokeOff, LogLine, Object
from penstock.launch.engines.kubernetes_state import (
    JOB_KINDS,
    cluster_of,
    ended_state,
    index_of,
    pods_of,
)
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.pods.node import EVENT, PROGRESS, rank_mark
from penstock.launch.render.kubernetes import pod_of
from penstock.launch.render.pod_template import labels_of

_ENDED = ("Succeeded", "Failed")
_POLL_PODS_S = 2.0
_MAX_SILENCE_S = 600.0
"""Seconds without an answer of the cluster after which the job is not waited for."""
_LAST_LINES_S = 30.0
"""Longest silence of a log after the end of its job; a node that is gone leaves one open for ever."""
_NONE = (datetime.min.replace(tzinfo=UTC), 0)
_MAX_WAITING = 10_000
"""Lines that were read and not printed yet; readers wait when there are more."""


def logs(job: Job, folder: JobFolder, rank: int, *, follow: bool) -> Iterator[str]:
    """Yield the lines that a rank printed, from the log of its pod.

    Raises:
        PenstockError: it has no pod, or has printed nothing.
    """
    spec, cluster = folder.spec(), cluster_of(job)
    mark, count = rank_mark(rank), 0

    def pods() -> list[Object]:
        found = pods_of(cluster, job.ident)
        if spec.nodes.is_elastic:  # a rank's pod is another one after each change of nodes
            return found
        return [pod for pod in found if index_of(pod) == rank // spec.processes]

    def started() -> PodsStarted:
        api, kind = JOB_KINDS[pod_of(spec).api]
        found = cluster.get(api, kind, job.ident)  # first: pods that it made until then are seen
        return started_of(pods(), is_over=found is None or ended_state(found) is not None)

    if follow:
        lines = followed(started, lambda name: cluster.log(name, follow=True))
    else:
        names = [pod["metadata"]["name"] for pod in pods()]
        lines = (line.text for name in names for line in cluster.log(name, follow=False))
    for line in lines:
        if line.startswith(mark):
            count += 1
            yield line.removeprefix(mark)
    if not count and not follow:
        fix = f"It has {spec.most_ranks} ranks; `penstock launch status` shows its pods."
        raise PenstockError(f"Rank {rank} has printed nothing", fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsStarted:
    """Pods of a job whose logs can be read."""

    names: Mapping[str, str]
    """By their uid."""
    running: Collection[str] = ()
    """Uids of those that have not ended."""
    is_over: bool
    """True if the job has ended: no other pod starts."""


def started_of(pods: Sequence[Object], *, is_over: bool) -> PodsStarted:
    """Return those of a job's pods whose logs can be read.

    The log of a pod whose node does not answer (phase Unknown) cannot be read now; it may run.
    """
    phases = {pod["metadata"]["uid"]: (pod.get("status") or {}).get("phase") for pod in pods}
    names = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods}
    return PodsStarted(
        names={uid: name for uid, name in names.items() if phases[uid] in ("Running", *_ENDED)},
        running=[uid for uid, phase in phases.items() if phase == "Running"],
        is_over=is_over,
    )


def followed(
    started: Callable[[], PodsStarted],
    read: Callable[[str], Iterator[LogLine]],
    *,
    pause_s: float = _POLL_PODS_S,
) -> Iterator[str]:
    """Yield the lines of a job's pods as they come, also of pods that start later, until the job is over.

    Args:
        started: returns the pods that have started.
        read: returns the lines of the pod of a name, from its first line to the end of the pod, or of the
            connection.
        pause_s: seconds between two calls of `started`.

    Raises:
        EngineUnreachable: the cluster does not answer at first, or has not for long.
        BaseException: what `started` or `read` raised.
    """
    readers, answered_at = _LogReaders(read), -math.inf
    while True:
        try:
            now = started()
        except EngineUnreachable:  # as an API server that is replaced
            if clock.monotonic() - answered_at > _MAX_SILENCE_S:
                raise
            yield from readers.lines_for(pause_s)
            continue
        answered_at = clock.monotonic()
        for uid, name in now.names.items():
            readers.begin(uid, name, is_running=uid in now.running)
        if now.is_over:
            yield from readers.last_lines()
            for uid, name in now.names.items():  # of connections that ended before their pods
                readers.begin(uid, name, is_running=False)
            yield from readers.last_lines()
            return
        yield from readers.lines_for(pause_s)


class _LogReaders:
    """Threads that read the logs of pods, one each.

    A connection may end or break off long before its pod: servers and proxies close those that carry nothing
    for a while. So a pod whose log was opened while it ran is read again, from its first line; lines that are
    earlier than the newest one are passed over, and of those of its microsecond as many as were printed.
    """

    def __init__(self, read: Callable[[str], Iterator[LogLine]]) -> None:
        self._read = read
        self._found: Queue[str | BaseException | _PodRead] = Queue(_MAX_WAITING)
        self._open: set[str] = set()
        self._whole: set[str] = set()
        """Pods that were read to their end."""
        self._last: dict[str, tuple[datetime, int]] = {}
        """Pod -> when its newest line was printed, and the number of lines of that microsecond."""

    def begin(self, uid: str, name: str, *, is_running: bool) -> None:
        """Read a pod, unless that is being done or was done to its end."""
        if uid not in self._open and uid not in self._whole:
            self._open.add(uid)
            Thread(target=self._put_lines, args=(uid, name, is_running), daemon=True).start()

    def _put_lines(self, uid: str, name: str, is_running: bool) -> None:
        printed_at, num_printed = self._last.get(uid, _NONE)
        try:
            for line in self._read(name):
                if line.printed_at < printed_at:
                    continue
                if line.printed_at == printed_at and num_printed:
                    num_printed -= 1
                    continue
                self._count(uid, line.printed_at)
                self._found.put(line.text)
            self._found.put(_PodRead(uid, is_whole=not is_running))
        except (LogBrokeOff, EngineUnreachable) as error:
            self._found.put(_PodRead(uid, is_whole=False) if is_running else error)
        except BaseException as error:
            self._found.put(error)

    def _count(self, uid: str, printed_at: datetime) -> None:
        newest, num_lines = self._last.get(uid, _NONE)
        if printed_at > newest:
            self._last[uid] = (printed_at, 1)
        elif printed_at == newest:
            self._last[uid] = (newest, num_lines + 1)

    def lines_for(self, seconds: float) -> Iterator[str]:
        """Yield the lines that come within some seconds."""
        end = clock.monotonic() + seconds
        with suppress(Empty):
            while (left_s := end - clock.monotonic()) > 0:
                yield from self._next(left_s)

    def last_lines(self) -> Iterator[str]:
        """Yield lines until all logs have ended, or none has brought one for long."""
        with suppress(Empty):
            while self._open:
                yield from self._next(_LAST_LINES_S)
        self._whole |= self._open
        self._open.clear()

    def _next(self, timeout_s: float) -> Iterator[str]:
        found = self._found.get(timeout=timeout_s)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, str):
            yield found
            return
        self._open.discard(found.uid)
        if found.is_whole:
            self._whole.add(found.uid)


@dataclass(frozen=True, slots=True)
class _PodRead:
    """The connection to a pod's log has ended."""

    uid: str
    is_whole: bool
    """True if the pod had ended when it was opened, so that no line can follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedRun:
    """Transitions and progress of a run, as its first pod printed them."""

    events: list[dict[str, Any]]  # Any: JSON values
    """Transitions, oldest first."""
    progress: dict[str, Any]
    """As `JobFolder.progress`; empty: no pod has printed it."""


def read_printed_run(job: Job) -> PrintedRun:
    """Return the run's transitions and its progress, from the newest first pod that has printed them.

    Raises:
        PenstockError: logs may not be read, or the cluster cannot be reached.
    """
    cluster = cluster_of(job)
    first = [pod for pod in cluster.all("v1", "Pod", labels_of(job.ident)) if index_of(pod) == 0]
    for pod in sorted(first, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True):
        lines = [line.text for line in cluster.log(pod["metadata"]["name"], follow=False)]
        if progress := _printed(lines, PROGRESS):
            return PrintedRun(events=_printed(lines, EVENT), progress=progress[-1])
    return PrintedRun(events=[], progress={})


def _printed(lines: Sequence[str], mark: str) -> list[dict[str, Any]]:  # Any: JSON values
    """Return the objects in the lines that begin with a mark; a line that is cut has none."""
    found = []
    for line in lines:
        with suppress(ValueError):
            if line.startswith(mark) and isinstance(value := json.loads(line.removeprefix(mark)), dict):
                found.append(value)
    return found

"""What the pods of a run print: lines of a rank, also of pods that start later, and the run's progress."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.launch.engines.kubernetes_api import Object
from penstock.launch.engines.kubernetes_state import (
    JOB_KINDS,
    cluster_of,
    ended_state,
    index_of,
    pods_of,
)
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.pod_node import EVENT, PROGRESS, rank_mark
from penstock.launch.render.kubernetes import pod_of
from penstock.launch.render.pod_template import labels_of

_LOOK_AT_PODS_S = 2.0
_LAST_LINES_S = 30.0
"""Longest silence of a log after the end of its job; a node that is gone leaves one open for ever."""


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

    def look() -> PodsStarted:
        api, kind = JOB_KINDS[pod_of(spec).api]
        found = cluster.get(api, kind, job.ident)  # first: pods that it made until then are seen
        started = [pod for pod in pods() if (pod.get("status") or {}).get("phase", "Pending") != "Pending"]
        names = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in started}
        return PodsStarted(names=names, is_over=found is None or ended_state(found) is not None)

    if follow:
        lines = followed(look, lambda name: cluster.log(name, follow=True))
    else:
        names = [pod["metadata"]["name"] for pod in pods()]
        lines = (line for name in names for line in cluster.log(name, follow=False))
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
    is_over: bool
    """True if the job has ended: no other pod starts."""


def followed(
    look: Callable[[], PodsStarted], read: Callable[[str], Iterator[str]], *, pause_s: float = _LOOK_AT_PODS_S
) -> Iterator[str]:
    """Yield the lines of a job's pods as they come, also of pods that start later, until the job is over.

    Args:
        look: returns the pods that have started.
        read: returns the lines of the pod of a name until it ends.
        pause_s: seconds between two looks.

    Raises:
        BaseException: what looking or reading raised.
    """
    readers = _LogReaders(read)
    while True:
        now = look()
        for uid, name in now.names.items():
            readers.begin(uid, name)
        if now.is_over:
            yield from readers.last_lines()
            return
        yield from readers.lines_for(pause_s)


class _LogReaders:
    """Threads that read the logs of pods, one each; a pod that printed nothing may be read again."""

    def __init__(self, read: Callable[[str], Iterator[str]]) -> None:
        self._read = read
        self._found: SimpleQueue[str | BaseException | _PodRead] = SimpleQueue()
        self._begun: set[str] = set()
        self._num_open = 0

    def begin(self, uid: str, name: str) -> None:
        if uid not in self._begun:
            self._begun.add(uid)
            self._num_open += 1
            Thread(target=self._put_lines, args=(uid, name), daemon=True).start()

    def _put_lines(self, uid: str, name: str) -> None:
        is_empty = True
        try:
            for line in self._read(name):
                is_empty = False
                self._found.put(line)
            self._found.put(_PodRead(uid, is_empty))
        except BaseException as error:
            self._found.put(error)

    def lines_for(self, seconds: float) -> Iterator[str]:
        """Yield the lines that come within some seconds."""
        end = clock.monotonic() + seconds
        with suppress(Empty):
            while (left_s := end - clock.monotonic()) > 0:
                yield from self._next(left_s)

    def last_lines(self) -> Iterator[str]:
        """Yield lines until all logs have ended, or none has brought one for long."""
        with suppress(Empty):
            while self._num_open:
                yield from self._next(_LAST_LINES_S)

    def _next(self, timeout_s: float) -> Iterator[str]:
        found = self._found.get(timeout=timeout_s)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, str):
            yield found
            return
        self._num_open -= 1
        if found.is_empty:
            self._begun.discard(found.uid)


@dataclass(frozen=True, slots=True)
class _PodRead:
    """A pod was read to its end."""

    uid: str
    is_empty: bool


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
        lines = [*cluster.log(pod["metadata"]["name"], follow=False)]
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

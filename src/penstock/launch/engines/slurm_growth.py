"""More nodes for an elastic Slurm job: a job of their own, whose nodes join the run.

Slurm gives a running job no further nodes. So while a run has fewer nodes than its MAX (one was lost, or the
queue had no more at its start), its supervisor submits a second job for those that are missing. That job
waits in the queue like any other, and costs the run nothing meanwhile. When Slurm starts it, its nodes join
the rendezvous in the first job; all ranks save, and go on together. It ends with the run.

Slurm is asked in a thread: a controller that is busy answers after a minute, and the supervisor has to see
requests, signals and the end of its processes meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from penstock.core import clock
from penstock.core.env import RENDEZVOUS_KEY
from penstock.core.errors import PenstockError
from penstock.core.files import write_atomic
from penstock.core.units import plural
from penstock.launch.engines.slurm_commands import job_id
from penstock.launch.job_folder import JobFolder
from penstock.launch.render.slurm import Joining, render_join
from penstock.launch.spec import RunSpec

ASKED = "asked"
"""Event of a job that was submitted for more nodes; its id is `joining`."""
_LOOK_S = 15.0
_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_STORE_LINGERS_S = 3.0
_END_S = 10.0
"""Seconds that the end waits for Slurm's answer to a question that was open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoiningJob:
    """A job whose nodes join the run."""

    ident: str
    nodes: range
    """Numbers of its nodes in the run's events."""

    def has_joined(self, starts: Sequence[Mapping[str, Any]]) -> bool:  # Any: JSON
        """Return True if one of its nodes has trained."""
        return any(int(start["node"]) in self.nodes for start in starts)


def nodes_to_ask(
    most: int,
    starts: Sequence[Mapping[str, Any]],  # Any: JSON
    asked: Sequence[JoiningJob],
    queue: Sequence[str],
) -> int:
    """Return for how many nodes to submit a job now.

    Args:
        most: nodes that the run can use.
        starts: events of nodes that began to train, oldest first, each with the nodes that there were then.
        asked: jobs submitted before.
        queue: ids of those that wait or run.

    >>> starts = [{"node": 0, "nodes": 3}, {"node": 0, "nodes": 2}]
    >>> nodes_to_ask(3, starts, [], [])
    1
    >>> nodes_to_ask(3, starts, [JoiningJob(ident="8", nodes=range(3, 4))], ["8"])
    0
    """
    if not starts:
        return 0
    if any(job.ident in queue and not job.has_joined(starts) for job in asked):
        return 0
    return max(0, most - int(starts[-1]["nodes"]))


def pause_after(starts: Sequence[Mapping[str, Any]], asked: Sequence[JoiningJob]) -> float:  # Any: JSON
    """Return the pause in seconds before the next job: it doubles with each in a row that never trained.

    >>> pause_after([], [JoiningJob(ident=str(i), nodes=range(i, i + 1)) for i in range(3)])
    240.0
    """
    in_vain = 0
    for job in reversed(asked):
        if job.has_joined(starts):
            break
        in_vain += 1
    return min(_PAUSE_S * 2 ** (in_vain - 1), _LONGEST_PAUSE_S) if in_vain else 0.0


class Commands(Protocol):
    """Runs a command of Slurm; returns what it prints."""

    def __call__(
        self,
        *words: str,
        is_tried: bool = False,
        as_new: bool = False,
        more: Mapping[str, str] | None = None,
    ) -> str:
        """Run it; `as_new`: without the variables of the job that this process is in; `more`: with others."""


class NodeGrowth:
    """Asks Slurm for the nodes that an elastic run lacks.

    Args:
        job: id of the job that supervises.
        host: returns the address of the rendezvous.
        port: of the rendezvous.
        key: of the rendezvous; jobs have it in their environment.
        run: runs commands of Slurm.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: JobFolder,
        *,
        job: str,
        host: Callable[[], str],
        port: int,
        key: str,
        run: Commands,
    ) -> None:
        self._spec, self._folder, self._job = spec, folder, job
        self._host, self._port, self._key, self._run = host, port, key, run
        self._seen = len(folder.events())
        self._asked: list[JoiningJob] = []
        self._look_at = clock.monotonic() + _LOOK_S
        self._said = ""
        self._asking: Thread | None = None
        self._has_ended = False

    def look(self) -> None:
        """Begin to ask for more nodes, if it is time and some are missing; what Slurm refuses is logged."""
        is_asking = self._asking is not None and self._asking.is_alive()
        if is_asking or clock.monotonic() < self._look_at:
            return
        self._asking = Thread(target=self._ask, name="slurm-growth", daemon=True)
        self._asking.start()

    def _ask(self) -> None:
        now = clock.monotonic()
        self._look_at = now + _LOOK_S
        events = self._folder.events()[self._seen :]
        starts = [event for event in events if event["event"] == "start" and "first_rank" in event]
        is_full = bool(starts) and not nodes_to_ask(self._spec.nodes.most, starts, [], [])
        try:
            if is_full:
                self._take_back([job.ident for job in self._asked if not job.has_joined(starts)])
            elif missing := nodes_to_ask(self._spec.nodes.most, starts, self._asked, self._queued()):
                if not self._has_ended:
                    self._submit(missing)
                self._look_at = now + max(_LOOK_S, pause_after(starts, self._asked))
        except (PenstockError, OSError) as error:
            if str(error) != self._said:
                self._said = str(error)
                self._folder.log_event("refused", cause=f"no more nodes: {error}")
            self._look_at = now + _PAUSE_S

    @property
    def idents(self) -> list[str]:
        """Ids of the jobs that were submitted: their steps are told to stop with those of the first job."""
        return [job.ident for job in self._asked]

    def end(self) -> None:
        """End the jobs that were submitted: what waits, and nodes that would go on without the first job."""
        self._has_ended = True
        if self._asking is not None:
            self._asking.join(_END_S)
        if self._asked:
            clock.sleep(_STORE_LINGERS_S)  # they read how it ended
            with suppress(PenstockError):
                self._run("scancel", "--quiet", *self.idents, is_tried=True)

    def _take_back(self, idents: Sequence[str]) -> None:
        """Cancel jobs that wait, once the run has all its nodes: theirs would be idle, and billed."""
        if waiting := [ident for ident in idents if ident in self._queued()]:
            self._run("scancel", "--quiet", "--state=PENDING", *waiting, is_tried=True)

    def _queued(self) -> Sequence[str]:
        """Return the ids of this user's jobs; asked by user, because an id that is forgotten is an error."""
        return self._run("squeue", "--me", "--noheader", "--format=%i").split() if self._asked else []

    def _submit(self, missing: int) -> None:
        first = self._asked[-1].nodes.stop if self._asked else self._spec.nodes.most
        joining = Joining(
            job=self._job, host=self._host(), port=self._port, first_node=first, num_nodes=missing
        )
        path, script = render_join(self._spec, joining)
        write_atomic(Path(path), script)
        words = ("sbatch", "--parsable", "--export=ALL", path)
        ident = job_id(self._run(*words, as_new=True, more={RENDEZVOUS_KEY: self._key}))
        job = JoiningJob(ident=ident, nodes=range(first, first + missing))
        self._asked.append(job)
        cause = f"{plural(missing, 'node')} fewer than {self._spec.nodes.most}: job {ident} waits for more"
        self._folder.log_event(ASKED, cause=cause, joining=ident)

"""Interface of the engines that run jobs, for `penstock launch status|cancel|resize`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.core.table import Table
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.spec import NodeRange


class EngineUnreachable(PenstockError):
    """The engine does not answer: its jobs may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job, as its engine tells it."""

    is_live: bool
    """True if it runs, or waits for its turn."""
    status: str
    """The engine's word: RUNNING, PENDING, ended ..."""
    reason: str = ""
    """Reason for the state, and what to do where nothing but that ends it."""
    is_stuck: bool = False
    """True if it waits until somebody does something."""

    def check_stoppable(self, job: Job) -> None:
        """Refuse to stop a job that has ended.

        Raises:
            PenstockError: with its end.
        """
        if not self.is_live:
            raise PenstockError(
                f"Job {job.ident} has ended already: {self.status}, {self.reason}",
                fix="There is nothing to stop; launch it again to continue.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job of Penstock in the list of an engine."""

    state: JobState
    run: str = ""
    """Folder of its run; empty: the engine does not know it."""


class LaunchEngine(Protocol):
    """Functions of an engine's module."""

    def state(self, job: Job, folder: JobFolder) -> JobState:
        """Return the state of a job.

        Raises:
            PenstockError: nobody knows; EngineUnreachable: nobody knows now.
        """

    def jobs(self, host: str, known: Collection[str] = ()) -> Mapping[str, QueuedJob]:
        """Return the jobs of Penstock that an engine lists, by id.

        Args:
            host: where they were submitted to, as `Job.host`.
            known: ids that are listed whoever submitted them; of others this user's, where it knows users.

        Raises:
            PenstockError: it does not answer.
        """

    def cancel(self, job: Job, folder: JobFolder, *, now: bool) -> str:
        """Stop a job, after saving unless `now`; return what was done."""

    def resize(self, job: Job, folder: JobFolder, nodes: NodeRange) -> str:
        """Give a job another number of nodes; return what was done."""


ENGINES: Mapping[str, LaunchEngine] = Table(
    "engine",
    {
        "local": "penstock.launch.engines.local:ENGINE",
        "slurm": "penstock.launch.engines.slurm:ENGINE",
        "kubernetes": "penstock.launch.engines.kubernetes:ENGINE",
    },
)
"""Engines by name."""
_WITHOUT_CLUSTER = ("local", "slurm")


def stop_between_starts(folder: JobFolder) -> str:
    """Mark a launched run as one to stop for good while none of its processes is there to be asked.

    Its supervisor sees the mark before the next start. Return what to tell the user; empty: nothing was
    marked, as no job would see it. On Kubernetes that is so until the run's first pod has started.
    """
    pods = folder.started_job()
    if pods and pods != folder.finished_job():
        folder.ask_to_stop(pods)
        return (
            f"No pod of job {pods} trains now: pods that it starts again end before they train. Pods of "
            "another job, as after a time limit or a resize, do not: `penstock launch cancel` ends any"
        )
    if not folder.has_job() or (job := folder.job()).engine not in _WITHOUT_CLUSTER:
        return ""
    state = ENGINES[job.engine].state(job, folder)
    if not state.is_live:
        return ""
    folder.ask_to_stop()
    now = f"Job {job.ident} of {job.engine} is {state.status} and trains nothing now"
    return f"{now}: it ends before its next start"

"""Interface of the engines that run jobs, for `penstock launch status|cancel|resize`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.core.table import Table
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.spec import NodeRange


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job, as its engine tells it."""

    is_live: bool
    """True if it runs, or waits for its turn."""
    status: str
    """The engine's word: RUNNING, PENDING, ended ..."""
    reason: str = ""
    """Reason for the state."""


class LaunchEngine(Protocol):
    """Functions of an engine's module."""

    def state(self, job: Job, folder: JobFolder) -> JobState:
        """Return the state of a job."""

    def cancel(self, job: Job, folder: JobFolder, *, now: bool) -> str:
        """Stop a job, after saving unless `now`; return what was done."""

    def resize(self, job: Job, folder: JobFolder, nodes: NodeRange) -> str:
        """Give a job another number of nodes; return what was done."""


ENGINES: Mapping[str, LaunchEngine] = Table(
    "engine",
    {"local": "penstock.launch.engines.local:ENGINE", "slurm": "penstock.launch.engines.slurm:ENGINE"},
)
"""Engines by name."""

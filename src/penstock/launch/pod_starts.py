"""Starts of a node's pods in a row that failed without a new checkpoint; kept in the run's folder.

A pod that is killed says nothing, so each pod notes its start, and takes the note back when it ends well, or
after saving: one that is lost without a signal, or killed at the end of its grace, counts. Kubernetes counts
failed pods over the whole life of a job, which would end a run of months for a failure now and then; here a
new checkpoint begins the count again.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.core.files import write_json
from penstock.launch.job_folder import JobFolder
from penstock.launch.local import EXIT_STOPPED

MOST_FAILED = 6
"""Pods of a node in a row that fail without a new checkpoint. With Kubernetes' back-off that is ten minutes,
in which an operator can exclude the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    job: str
    newest: int | None
    """Step of the newest checkpoint at the first of them; None: the storage has not told."""
    failed: int = 0
    """Pods before this one that failed since."""


@dataclass(frozen=True, slots=True)
class PodStarts:
    """The starts of the pods of one node."""

    folder: JobFolder
    node: int

    @property
    def _path(self) -> Path:
        return self.folder.path / "pods" / f"node-{self.node:05d}.json"

    def begin(self, job: str) -> int:
        """Note that a pod of a job starts; return how many failed before it, without a new checkpoint.

        A folder that cannot be written counts nothing: what the pod needs it for fails by itself.
        """
        newest, before = self.folder.newest_known(), self._noted()
        failed = 0
        if before is not None and before.job == job and newest in (before.newest, None):
            newest, failed = before.newest, before.failed + 1
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, asdict(_Note(job=job, newest=newest, failed=failed)))
        return failed

    def end(self, code: int) -> None:
        """Note that the pod ends with a code."""
        if code in (0, EXIT_STOPPED):
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _noted(self) -> _Note | None:
        try:
            raw = json.loads(self._path.read_text())
            newest = None if raw["newest"] is None else int(raw["newest"])
            return _Note(job=str(raw["job"]), newest=newest, failed=int(raw["failed"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

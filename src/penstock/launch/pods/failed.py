"""Counts how many pods of one node have failed in a row since the last new checkpoint.

The count is a file in the run's folder. A pod that is killed says nothing, so each pod writes a note when it
starts, and removes it when it finishes (0) or stops on request (75). A note that is left behind counts as a
failure: also of a pod that was lost without a signal, or killed at the end of its grace. Kubernetes counts
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

MAX_FAILED = 6
"""Pods of a node in a row that fail without a new checkpoint. With Kubernetes' back-off that is ten minutes,
in which an operator can exclude the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    job: str
    newest: int | None
    """Step of the newest checkpoint when this count began; -1: there was none; None: it could not be read."""
    failed: int = 0
    """Pods of this node that have failed since then, not counting this one."""


@dataclass(frozen=True, slots=True)
class FailedPods:
    """Count of one node's pods that have failed in a row."""

    folder: JobFolder
    node: int

    @property
    def _path(self) -> Path:
        return self.folder.path / "pods" / f"node-{self.node:05d}.json"

    def begin(self, job: str) -> int:
        """Write the note of a pod of a job; return how many failed before it, since the last new checkpoint.

        If the folder cannot be written, the failure is not counted; the pod fails later anyway, when it tries
        to write there.
        """
        newest, before = self.folder.newest_known(), self._noted()
        failed = 0
        if before is not None and before.job == job and newest in (before.newest, None):
            newest, failed = before.newest, before.failed + 1
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, asdict(_Note(job=job, newest=newest, failed=failed)))
        return failed

    def clear_unless_failed(self, exit_code: int) -> None:
        """Remove the note if the pod did not fail."""
        if exit_code in (0, EXIT_STOPPED):
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _noted(self) -> _Note | None:
        try:
            raw = json.loads(self._path.read_text())
            newest = None if raw["newest"] is None else int(raw["newest"])
            return _Note(job=str(raw["job"]), newest=newest, failed=int(raw["failed"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

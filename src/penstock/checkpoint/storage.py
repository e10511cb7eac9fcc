"""Checkpoint storage: the protocol of local folders and object stores; no torch.

A storage knows names, files and bytes, and one law: a checkpoint exists when its index does, not before.
Paths go to local_storage.py, addresses (s3://, gs://, az://) to remote_storage.py; only this file knows both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from penstock.checkpoint.layout import FOLDER
from penstock.core.config import load_json
from penstock.core.errors import CheckpointError, PenstockError
from penstock.obs.metric_names import RECIPE_FILE


class CheckpointStorage(Protocol):
    """Storage of the checkpoints of one run. Its methods raise OSError or CheckpointError on failure."""

    def url_of(self, name: str) -> str:
        """Return the path or address of a checkpoint, or of a file of one, for messages."""

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, in no order."""

    def leftovers(self) -> list[str]:
        """Return the names of incomplete checkpoints of a killed writer."""

    def write(self, name: str, file: str, parts: Sequence[memoryview]) -> None:
        """Write one file of an uncommitted checkpoint, durably."""

    def commit(self, name: str, index: bytes) -> None:
        """Complete a written checkpoint, replacing one of that name."""

    def abandon(self, name: str) -> None:
        """Remove the files of a checkpoint that will not be committed."""

    def remove(self, name: str) -> None:
        """Remove a complete or incomplete checkpoint; a reader never takes a partial one for complete."""

    def set_aside(self, name: str) -> None:
        """Keep a checkpoint's bytes, but exclude it from resuming."""

    def size(self, name: str, file: str) -> int:
        """Return the size of a file in bytes."""

    def read(self, name: str, file: str, start: int, stop: int) -> memoryview:
        """Return bytes of a file, fewer at its end; writable and owned by the caller."""


def open_place(location: str) -> CheckpointStorage:
    """Return the storage of a path or an address; nothing is read or written yet.

    Raises:
        ConfigError: an invalid address.
    """
    if "://" in location:
        from penstock.checkpoint.remote_storage import RemotePlace

        return RemotePlace(location)
    from penstock.checkpoint.local_storage import LocalPlace

    return LocalPlace(Path(location))


def place_in(run: Path, location: str) -> CheckpointStorage:
    """Return the storage of a run's checkpoints.

    Args:
        location: checkpoint.dir of its recipe; empty: inside the run's folder.
    """
    return open_place(location or str(run / FOLDER))


def place_of(run: Path) -> CheckpointStorage:
    """Return the storage of a run's checkpoints, from the recipe in its folder.

    Raises:
        CheckpointError: that recipe is damaged.
    """
    try:
        recipe = load_json(run / RECIPE_FILE) if (run / RECIPE_FILE).is_file() else {}
        location = recipe.get("checkpoint", {}).get("dir", "")
    except (PenstockError, AttributeError) as error:
        raise CheckpointError(f"{run / RECIPE_FILE} is damaged: {error}", fix="Restore it.") from None
    return place_in(run, str(location))

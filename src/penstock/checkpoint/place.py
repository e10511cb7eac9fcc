"""Where checkpoints lie: the seam between what a checkpoint is and what holds its bytes; no torch.

A place knows names, files and bytes, and one law: a checkpoint is there when its index is, and not before.
Paths go to place_local.py, addresses (s3://, gs://, az://) to place_remote.py; only this file knows both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from penstock.checkpoint.layout import FOLDER
from penstock.core.config import load_json
from penstock.core.errors import CheckpointError, PenstockError
from penstock.obs.names import RECIPE_FILE


class Place(Protocol):
    """Holds the checkpoints of one run. Its methods raise OSError or CheckpointError where they fail."""

    def url_of(self, name: str) -> str:
        """Return what a person calls a checkpoint, or a file of one."""

    def names(self) -> list[str]:
        """Return the names of what is complete, in no order."""

    def leftovers(self) -> list[str]:
        """Return the names of what a killed writer left half-written."""

    def write(self, name: str, file: str, parts: Sequence[memoryview]) -> None:
        """Write one file of a checkpoint to come, durably."""

    def commit(self, name: str, index: bytes) -> None:
        """Make a written checkpoint exist, in the stead of one of that name."""

    def abandon(self, name: str) -> None:
        """Remove what was written of a checkpoint that will not be committed."""

    def remove(self, name: str) -> None:
        """Remove what is complete or left over; a reader never takes what remains for whole."""

    def set_aside(self, name: str) -> None:
        """Keep a checkpoint's bytes, but no more as one that a run resumes from."""

    def size(self, name: str, file: str) -> int:
        """Return the bytes of a file."""

    def read(self, name: str, file: str, start: int, stop: int) -> memoryview:
        """Return bytes of a file, fewer where it ends before; they are the caller's, writable."""


def open_place(location: str) -> Place:
    """Return the place of a path or an address; nothing is touched yet.

    Raises:
        ConfigError: an address that is not understood.
    """
    if "://" in location:
        from penstock.checkpoint.place_remote import RemotePlace

        return RemotePlace(location)
    from penstock.checkpoint.place_local import LocalPlace

    return LocalPlace(Path(location))


def place_in(run: Path, location: str) -> Place:
    """Return the place of a run's checkpoints.

    Args:
        location: checkpoint.dir of its recipe; empty: inside the run's folder.
    """
    return open_place(location or str(run / FOLDER))


def place_of(run: Path) -> Place:
    """Return the place of a run's checkpoints, as the recipe in its folder says.

    Raises:
        CheckpointError: that recipe is damaged.
    """
    try:
        recipe = load_json(run / RECIPE_FILE) if (run / RECIPE_FILE).is_file() else {}
        location = recipe.get("checkpoint", {}).get("dir", "")
    except (PenstockError, AttributeError) as error:
        raise CheckpointError(f"{run / RECIPE_FILE} is damaged: {error}", fix="Restore it.") from None
    return place_in(run, str(location))

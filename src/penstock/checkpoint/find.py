"""Checkpoints of a run: listing, and retention; no torch."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.layout import INDEX_FILE, CheckpointIndex, Meta, decode, in_order, name_of
from penstock.checkpoint.storage import CheckpointStorage, open_place, place_of
from penstock.core.config import load_json
from penstock.core.errors import CheckpointDamaged, CheckpointError, UsageError


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """Complete checkpoint in a storage."""

    place: CheckpointStorage
    name: str

    def __str__(self) -> str:
        """Return its path or address."""
        return self.place.url_of(self.name)

    def index(self) -> CheckpointIndex:
        """Read its index.

        Raises:
            CheckpointDamaged: its index is damaged.
            CheckpointError: it is gone, or another version of Penstock wrote it.
        """
        try:
            size = self.place.size(self.name, INDEX_FILE)
            content = bytes(self.place.read(self.name, INDEX_FILE, 0, size))
        except OSError as error:
            raise CheckpointError(
                f"{self} cannot be read: {error.strerror or error}", fix="Give a checkpoint or run folder."
            ) from None
        return decode(content, path=self.place.url_of(f"{self.name}/{INDEX_FILE}"))


def saved_in(place: CheckpointStorage) -> list[SavedCheckpoint]:
    """Return the complete checkpoints in a storage, oldest first."""
    return [SavedCheckpoint(place, name) for name in in_order(place.names())]


def saved_of(run: Path) -> list[SavedCheckpoint]:
    """Return the complete checkpoints of a run, oldest first.

    Raises:
        CheckpointError: the recipe with their location is damaged.
    """
    return saved_in(place_of(run))


def saved_at(location: str) -> list[SavedCheckpoint]:
    """Return the complete checkpoints of a run folder, a checkpoint's own folder or an address.

    Raises:
        UsageError: there is no such folder.
        CheckpointError: the recipe of the run is damaged.
    """
    if "://" in location:
        return saved_in(open_place(location))
    path = Path(location)
    if not path.is_dir():
        raise UsageError(f"{location} is not a folder", fix="Give the folder of a run, or of a checkpoint.")
    return [find(path)] if (path / INDEX_FILE).is_file() else saved_of(path)


def find(path: Path, *, step: int | None = None) -> SavedCheckpoint:
    """Return the checkpoint of a path: itself, or the newest complete one of a run.

    Args:
        step: step of a run's checkpoint, instead of the newest.

    Raises:
        CheckpointError: there is none; the message lists those that exist.
    """
    if (path / INDEX_FILE).is_file():
        return SavedCheckpoint(open_place(str(path.parent)), path.name)
    found = saved_of(path)
    if step is not None:
        if named := [saved for saved in found if saved.name == name_of(step)]:
            return named[0]
        known = ", ".join(saved.name for saved in found[-8:]) or "none"
        raise CheckpointError(f"{path} has no complete checkpoint of step {step}", fix=f"It has {known}.")
    if found:
        return found[-1]
    if (path / "config.json").is_file() and "run" not in load_json(path / "config.json"):
        raise CheckpointError(
            f"config.json in {path} has no model_type", fix="Take it from where the weights came from."
        )
    state = "has no complete checkpoint" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {state}", fix="Give the folder of a run, a checkpoint or a model.")


def newest_meta(candidates: Sequence[SavedCheckpoint]) -> Meta | None:
    """Return what the newest checkpoint with an intact index says of its run; None: there is none.

    Args:
        candidates: oldest first.
    """
    for saved in reversed(candidates):
        with suppress(CheckpointDamaged):
            return saved.index().meta
    return None


def to_remove(steps: Sequence[int], *, written: int, keep: int, keep_every: int, best: int = 0) -> list[int]:
    """Return the steps whose checkpoints to delete after one was written.

    Args:
        steps: steps of all complete checkpoints.
        written: step of the one just written, which is always kept.
        keep: number of newest ones to keep.
        keep_every: also keep those at multiples of this step; 0: none.
        best: also keep the newest up to this step, that of the best validation; 0: there is none.

    >>> to_remove([100, 200, 300, 400, 500], written=500, keep=2, keep_every=200)
    [100, 300]
    >>> to_remove([100, 200, 300, 400, 500], written=500, keep=1, keep_every=0, best=300)
    [100, 200, 400]
    """
    newest = set(sorted(steps)[-keep:]) | {written} | {max((s for s in steps if s <= best), default=written)}
    return [
        step for step in sorted(steps) if step not in newest and not (keep_every and step % keep_every == 0)
    ]

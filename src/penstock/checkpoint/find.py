"""Which checkpoints a run has, and which one a path means; no torch."""

from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.layout import INDEX_FILE, Index, decode, in_order, name_of
from penstock.checkpoint.place import Place, open_place, place_of
from penstock.core.errors import CheckpointError, UsageError


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint."""

    place: Place
    name: str

    def __str__(self) -> str:
        """Return its path or address."""
        return self.place.url_of(self.name)

    def index(self) -> Index:
        """Read what it says about itself.

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


def saved_in(place: Place) -> list[Saved]:
    """Return the complete checkpoints of a place, oldest first."""
    return [Saved(place, name) for name in in_order(place.names())]


def saved_of(run: Path) -> list[Saved]:
    """Return the complete checkpoints of a run, oldest first.

    Raises:
        CheckpointError: the recipe that says where they are is damaged.
    """
    return saved_in(place_of(run))


def saved_at(location: str) -> list[Saved]:
    """Return the complete checkpoints that a run, a checkpoint's own folder or an address means.

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


def find(path: Path, *, step: int | None = None) -> Saved:
    """Return the checkpoint that a path means: itself, or the newest complete one of a run.

    Args:
        step: of a run's checkpoint, instead of the newest.

    Raises:
        CheckpointError: there is none; with those there are.
    """
    if (path / INDEX_FILE).is_file():
        return Saved(open_place(str(path.parent)), path.name)
    found = saved_of(path)
    if step is not None:
        if named := [saved for saved in found if saved.name == name_of(step)]:
            return named[0]
        known = ", ".join(saved.name for saved in found[-8:]) or "none"
        raise CheckpointError(f"{path} has no complete checkpoint of step {step}", fix=f"It has {known}.")
    if found:
        return found[-1]
    state = "has no complete checkpoint" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {state}", fix="Give the folder of a run, a checkpoint or a model.")

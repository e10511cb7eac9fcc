"""The samples that rewinds leave out, in a file beside the run until its checkpoints know of them.

The checkpoint that a rewind goes back to knows nothing of it, and a run may be killed before the next. So the
rewind is written down before anything is set aside: first up to which step data is left out, then, when the
loader stands at the older checkpoint, which samples that are. A start reads the file and leaves out again
whatever lies before it; to leave out twice changes nothing.
"""

import json
import logging
from pathlib import Path
from typing import NamedTuple

from penstock.core.errors import PenstockError
from penstock.core.files import write_json
from penstock.data import Loader
from penstock.obs.names import LEFT_OUT_FILE
from penstock.parallel.mesh import World
from penstock.train.control import share

log = logging.getLogger(__name__)


class Stretch(NamedTuple):
    """Samples that one rewind leaves out."""

    to: int
    """Last step, counted from 1, whose samples are left out; a loader past it knows them."""
    samples: range | None
    """Their ids; None: those from the checkpoint's step on, which has not been seen yet."""


def note_rewind(folder: Path, *, to: int) -> None:
    """Write down that a run goes back, to leave out the data of the steps up to `to`; for rank 0."""
    _write(folder, [*read_left_out(folder), Stretch(to, None)])


def leave_out(folder: Path, loader: Loader, world: World) -> None:
    """Leave out what the run's rewinds did, as far as the loader does not know; every rank must call it.

    Raises:
        PenstockError: the file of the run is not what was written.
    """
    if world.is_first and loader.step == 0:
        (folder / LEFT_OUT_FILE).unlink(missing_ok=True)  # of a run that was started over
    told = share(world, [_to_json(one) for one in read_left_out(folder)] if world.is_first else None)
    known = [_from_json(one) for one in told]
    kept = [_left_out(one, loader) for one in known]
    if world.is_first and kept != known:
        _write(folder, [one for one in kept if one.samples is not None])


def read_left_out(folder: Path) -> list[Stretch]:
    """Return what the rewinds of a run left out, in their order; nothing, if there were none.

    Raises:
        PenstockError: the file is not what was written.
    """
    path = folder / LEFT_OUT_FILE
    try:
        return [_from_json(one) for one in json.loads(path.read_text())["rewinds"]]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise PenstockError(
            f"{path}, which says what rewinds left out, cannot be read: {error!r}",
            fix="Restore it, or remove it if a checkpoint was saved since the last rewind.",
        ) from None


def _left_out(one: Stretch, loader: Loader) -> Stretch:
    """Let a loader leave out a stretch that is before it; return it with the samples that it has."""
    if loader.step >= one.to:
        return one
    samples = one.samples
    if samples is None:
        first, last = loader.samples_of(loader.step)[0], loader.samples_of(one.to - 1)[-1]
        samples = range(int(first), int(last) + 1)
    loader.skip(samples=samples, reason="guard")
    return Stretch(one.to, samples)


def _write(folder: Path, stretches: list[Stretch]) -> None:
    write_json(folder / LEFT_OUT_FILE, {"rewinds": [_to_json(one) for one in stretches]})


def _to_json(one: Stretch) -> dict[str, object]:
    samples = None if one.samples is None else [one.samples.start, one.samples.stop]
    return {"to_step": one.to, "samples": samples}


def _from_json(one: dict[str, object]) -> Stretch:
    to, samples = one["to_step"], one["samples"]
    if not isinstance(to, int):
        raise TypeError(f"to_step {to!r}")
    return Stretch(to, None if samples is None else range(*_pair(samples)))


def _pair(samples: object) -> tuple[int, int]:
    if not (isinstance(samples, list) and len(samples) == 2 and all(isinstance(n, int) for n in samples)):
        raise TypeError(f"samples {samples!r}")
    return samples[0], samples[1]

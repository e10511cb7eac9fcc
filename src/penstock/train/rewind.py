"""Rewind: go back to a checkpoint before skipped steps, and leave out the samples in between.

If the trouble comes back, its cause is older than that checkpoint, so the next rewind goes further back.

The checkpoint does not know of the rewind, and the run may be killed before the next one. So the rewind is
recorded before newer checkpoints are set aside: first the step up to which data is left out, then, once the
loader is at the older checkpoint, the sample ids. A start reads the file and leaves these samples out again;
doing so twice changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from penstock.checkpoint.find import SavedCheckpoint
from penstock.checkpoint.layout import step_of
from penstock.core import config as configs
from penstock.core.errors import ConfigError, PenstockError, damaged
from penstock.core.files import write_json
from penstock.core.log import EventLog
from penstock.data import Loader
from penstock.obs.metric_names import LEFT_OUT_FILE
from penstock.parallel.mesh import World, broadcast
from penstock.train.data_setup import checkpoints
from penstock.train.guard import Rewind
from penstock.train.recipe.config import TrainConfig

log = EventLog(__name__)


def go_back(config: TrainConfig, world: World, asked: Rewind, *, tried: list[str]) -> None:
    """Set aside the checkpoints after the trouble; every rank must call it, with no save in progress.

    Args:
        tried: checkpoints of earlier rewinds of this process; this one's is added.

    Raises:
        Rewind: too many rewinds, or no such checkpoint.
    """
    names = [saved.name for saved in older(config, asked)] if world.is_first else None
    before = further_back(broadcast(world, names), tried)
    rewinds = len(tried) + 1
    if rewinds > config.guard.max_rewinds or not before:
        raise asked
    tried.append(before[-1])
    if world.is_first:
        log.warning(
            "rewound",
            "{reason:sentence}. Going back to {checkpoint}, without the data of the steps up to {step:,} "
            "(rewind {rewind} of {max_rewinds})",
            reason=asked.why,
            checkpoint=before[-1],
            step=asked.step,
            rewind=rewinds,
            max_rewinds=config.guard.max_rewinds,
        )
        note_rewind(Path(config.run.dir), to=asked.step)
        for saved in checkpoints(config):
            if saved.name not in before:
                _set_aside(saved)
    dist.barrier()


def older(config: TrainConfig, asked: Rewind) -> list[SavedCheckpoint]:
    """Return the checkpoints before the first skipped step."""
    return [saved for saved in checkpoints(config) if (step_of(saved.name) or 0) < asked.first]


def further_back(names: list[str], tried: list[str]) -> list[str]:
    """Return the checkpoints that a rewind keeps, oldest first; it goes back to the last one.

    A checkpoint is not used twice, unless there is no older one.

    >>> names = ["step-02", "step-04", "step-06"]
    >>> further_back(names, []), further_back(names, ["step-06"]), further_back(names[:1], ["step-02"])
    (['step-02', 'step-04', 'step-06'], ['step-02', 'step-04'], ['step-02'])
    """
    kept = list(names)
    while len(kept) > 1 and kept[-1] in tried:
        kept.pop()
    return kept


def _set_aside(saved: SavedCheckpoint) -> None:
    try:
        saved.place.set_aside(saved.name)
    except (OSError, PenstockError) as error:
        raise PenstockError(
            f"{saved} cannot be set aside: {error}", fix="Remove it, and run again."
        ) from None


@dataclass(frozen=True, slots=True)
class SkippedRange:
    """Samples that one rewind leaves out."""

    to_step: int
    """Last step, counted from 1, whose samples are left out; a loader past it has them in its state."""
    samples: tuple[int, int] | None
    """Sample ids [first, past); None: from the checkpoint's step on, not resolved yet."""


@dataclass(frozen=True, slots=True)
class Rewinds:
    """The file of a run's rewinds, in order."""

    rewinds: tuple[SkippedRange, ...]


def note_rewind(folder: Path, *, to: int) -> None:
    """Record a rewind that leaves out the data of the steps up to `to`; on rank 0."""
    _write(folder, [*read_left_out(folder), SkippedRange(to, None)])


def leave_out(folder: Path, loader: Loader, world: World) -> None:
    """Apply the run's rewinds that the loader's state does not include; every rank must call it.

    Raises:
        PenstockError: the run's file is damaged.
    """
    if world.is_first and loader.step == 0:
        (folder / LEFT_OUT_FILE).unlink(missing_ok=True)  # the run was started over
    told = broadcast(world, configs.dump(Rewinds(read_left_out(folder))) if world.is_first else None)
    known = configs.build(Rewinds, told).rewinds
    kept = tuple(_left_out(one, loader) for one in known)
    if world.is_first and kept != known:
        _write(folder, [one for one in kept if one.samples is not None])


def read_left_out(folder: Path) -> tuple[SkippedRange, ...]:
    """Return the samples left out by the rewinds of a run, in order.

    Raises:
        PenstockError: the file is damaged.
    """
    path = folder / LEFT_OUT_FILE
    if not path.is_file():
        return ()
    try:
        return configs.build(Rewinds, configs.load_json(path)).rewinds
    except ConfigError as error:
        raise PenstockError(
            f"The record of rewinds {damaged(path, error)}",
            fix="Restore it, or remove it if a checkpoint was saved since the last rewind.",
        ) from None


def _left_out(one: SkippedRange, loader: Loader) -> SkippedRange:
    """Apply one rewind if its end is ahead of the loader; return it with its sample ids."""
    if loader.step >= one.to_step:
        return one
    samples = one.samples
    if samples is None:
        samples = int(loader.samples_of(loader.step)[0]), int(loader.samples_of(one.to_step - 1)[-1]) + 1
    loader.skip(samples=range(*samples), reason="guard")
    return SkippedRange(one.to_step, samples)


def _write(folder: Path, rewinds: Sequence[SkippedRange]) -> None:
    write_json(folder / LEFT_OUT_FILE, configs.dump(Rewinds(tuple(rewinds))))

"""Bring a run back to before its trouble: newer checkpoints are set aside, and it resumes from an older."""

import logging
from pathlib import Path

import torch.distributed as dist

from penstock.checkpoint.find import Saved
from penstock.checkpoint.layout import step_of
from penstock.core.errors import PenstockError
from penstock.parallel.mesh import World
from penstock.train.config import TrainConfig
from penstock.train.control import share
from penstock.train.guard import Rewind
from penstock.train.left_out import note_rewind
from penstock.train.supply import checkpoints

log = logging.getLogger(__name__)


def go_back(config: TrainConfig, world: World, asked: Rewind, *, rewinds: int) -> None:
    """Make the newest checkpoint one from before the trouble; every rank must call it, no save under way.

    Args:
        rewinds: of this process, this one counted.

    Raises:
        Rewind: there were too many, or there is no such checkpoint.
    """
    before = share(world, [saved.name for saved in older(config, asked)] if world.is_first else None)
    if rewinds > config.guard.max_rewinds or not before:
        raise asked
    if world.is_first:
        log.warning(
            "%s; going back to %s and leaving out the data of the steps up to %d (rewinds=%d of %d)",
            asked.why, before[-1], asked.step, rewinds, config.guard.max_rewinds,
        )  # fmt: skip
        note_rewind(Path(config.run.dir), to=asked.step)
        for saved in checkpoints(config):
            if saved.name not in before:
                _set_aside(saved)
    dist.barrier()


def older(config: TrainConfig, asked: Rewind) -> list[Saved]:
    """Return the checkpoints from before the first step that could not be taken."""
    return [saved for saved in checkpoints(config) if (step_of(saved.name) or 0) < asked.first]


def _set_aside(saved: Saved) -> None:
    try:
        saved.place.set_aside(saved.name)
    except (OSError, PenstockError) as error:
        raise PenstockError(
            f"{saved} cannot be set aside: {error}", fix="Remove it, and run again."
        ) from None

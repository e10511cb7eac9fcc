"""Checkpoints of a run: which there are, and the one nearest to a step."""

from collections.abc import Sequence
from pathlib import Path

from penstock.checkpoint.find import saved_of
from penstock.checkpoint.layout import step_of


def steps_of(run: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, in order.

    Raises:
        PenstockError: their location is unknown or cannot be read.
    """
    return sorted({step for saved in saved_of(run) if (step := step_of(saved.name)) is not None})


def nearest_before(steps: Sequence[int], step: int) -> int | None:
    """Return the checkpoint whose weights are closest to those that a step began with.

    The last one before the step; without one, the first after it. None: there is none.

    >>> nearest_before([4, 8, 12], 9), nearest_before([4, 8], 4), nearest_before([], 4)
    (8, 4, None)
    """
    before = [one for one in steps if one < step]
    return max(before) if before else min(steps, default=None)

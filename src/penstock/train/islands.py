"""With how many islands a job goes on when it has lost some, or was asked for others; imports no torch.

The launcher of a job asks here each time that all its processes have ended. An island is lost as a whole:
what its other ranks hold is of no use without the rank that was killed. All processes start anew, from the
newest checkpoint, which any number of islands can go on from (outer_state.py).
"""

import math
from collections.abc import Callable
from pathlib import Path

from penstock.core import env
from penstock.core.errors import ConfigError, UsageError
from penstock.core.units import plural
from penstock.launch.local import EXIT_STOPPED, Outcome
from penstock.parallel.layout import ParallelConfig, layout_of
from penstock.train.config import TrainConfig
from penstock.train.derived import check_rows
from penstock.train.requests import CONTROL_FOLDER, answers


def ranks_of_island(parallel: ParallelConfig) -> int:
    """Return the ranks of one island.

    >>> ranks_of_island(ParallelConfig(replicate=-1, shard=4, tensor=2))
    8
    """
    return math.prod((parallel.pipeline, parallel.shard, parallel.context, parallel.tensor))


def check_islands(recipe: TrainConfig, islands: int) -> None:
    """Refuse a number of islands that a running job cannot go on with.

    Raises:
        UsageError: it has no launcher that could start others, or the recipe does not let it change.
        ConfigError: the recipe cannot run on so many.
    """
    fewest = recipe.outer.min_islands
    if not fewest or not env.has_launcher():
        raise UsageError(
            "The number of islands of this job cannot change while it runs",
            got=islands,
            fix="Set outer.min_islands and start it with `penstock train --processes`; under torchrun, start "
            "or stop an agent.",
        )
    if islands < fewest:
        raise UsageError(f"outer.min_islands is {fewest}", got=islands)
    ranks = islands * ranks_of_island(recipe.parallel)
    check_rows(recipe, world_size=layout_of(recipe.parallel, world_size=ranks).num_data)


def islands_left(recipe: TrainConfig, *, most: int) -> int:
    """Return the largest number of islands, up to so many, that a recipe can run on; 0: there is none."""
    for islands in range(most, recipe.outer.min_islands - 1, -1):
        layout = layout_of(recipe.parallel, world_size=islands * ranks_of_island(recipe.parallel))
        try:
            check_rows(recipe, world_size=layout.num_data)
        except ConfigError:
            continue
        return islands
    return 0


class Islands:
    """The islands of a job that Penstock's launcher started, over its starts.

    Args:
        processes: of the first start.
        say: tells a person what was lost.
    """

    def __init__(self, recipe: TrainConfig, *, processes: int, say: Callable[[str], None]) -> None:
        self._recipe = recipe
        self._processes = processes
        self._say = say
        self._answered = self._last_answer()[0]

    def again(self, outcome: Outcome) -> int:
        """Return on how many processes to start anew; 0: not."""
        islands, (number, asked) = 0, self._last_answer()
        if outcome.lost:  # what was asked before is no longer what the job goes on with
            islands = self._after_loss(outcome)
        elif outcome.code == EXIT_STOPPED and number > self._answered:
            islands = asked
        self._answered = number
        self._processes = islands * ranks_of_island(self._recipe.parallel)
        return self._processes

    def _after_loss(self, outcome: Outcome) -> int:
        layout = layout_of(self._recipe.parallel, world_size=self._processes)
        lost = {layout.place(rank)["replicate"] for rank in outcome.lost}
        left = islands_left(self._recipe, most=layout.replicate - len(lost))
        if left:
            self._say(f"{' '.join(outcome.messages)} The run goes on with {plural(left, 'island')}.")
        return left

    def _last_answer(self) -> tuple[int, int]:
        """Return the number of the last answer that changed the islands, and to how many; zeros: none did."""
        run = Path(self._recipe.run.dir)
        if not (run / CONTROL_FOLDER).is_dir():
            return 0, 0
        return max(((found.number, found.islands) for found in answers(run) if found.islands), default=(0, 0))

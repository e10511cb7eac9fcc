"""Number of islands after a loss of islands or a request; imports no torch.

The launcher of a job calls this each time all its processes have exited. An island is lost as a whole: its
other ranks are useless without the rank that died. All processes restart from the newest checkpoint, which
any number of islands can resume (islands/checkpoint.py).
"""

import math
from collections.abc import Callable
from pathlib import Path

from penstock.core import env
from penstock.core.errors import ConfigError, UsageError
from penstock.core.units import plural
from penstock.launch.local import EXIT_STOPPED, JobOutcome
from penstock.parallel.layout import ParallelConfig, layout_of
from penstock.train.control.requests import CONTROL_FOLDER, answers
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import check_rows


def ranks_of_island(parallel: ParallelConfig) -> int:
    """Return the number of ranks per island.

    >>> ranks_of_island(ParallelConfig(replicate=-1, shard=4, tensor=2))
    8
    """
    return math.prod((parallel.pipeline, parallel.shard, parallel.context, parallel.tensor))


def check_islands(recipe: TrainConfig, islands: int) -> None:
    """Refuse a number of islands with which a running job cannot continue.

    Raises:
        UsageError: the job has no launcher that could restart it, or the recipe fixes the number.
        ConfigError: the recipe cannot run on that many islands.
    """
    fewest = recipe.outer.min_islands
    if not fewest or not env.has_launcher():
        raise UsageError(
            "The number of islands of this job is fixed while it runs",
            got=islands,
            fix="Set outer.min_islands and start it with `penstock train --processes`; under torchrun, start "
            "or stop an agent.",
        )
    if islands < fewest:
        raise UsageError(
            f"outer.min_islands is {fewest}",
            got=islands,
            fix="Ask for as many, or start the job with a lower one.",
        )
    ranks = islands * ranks_of_island(recipe.parallel)
    check_rows(recipe, world_size=layout_of(recipe.parallel, world_size=ranks).num_data)


def islands_left(recipe: TrainConfig, *, most: int) -> int:
    """Return the largest number of islands, up to `most`, that a recipe can run on; 0: none."""
    for islands in range(most, recipe.outer.min_islands - 1, -1):
        layout = layout_of(recipe.parallel, world_size=islands * ranks_of_island(recipe.parallel))
        try:
            check_rows(recipe, world_size=layout.num_data)
        except ConfigError:
            continue
        return islands
    return 0


class Islands:
    """Islands of a job started by Penstock's launcher, across restarts.

    Args:
        processes: number of processes of the first start.
        say: prints a message to the user.
    """

    def __init__(self, recipe: TrainConfig, *, processes: int, say: Callable[[str], None]) -> None:
        self._recipe = recipe
        self._processes = processes
        self._say = say
        self._answered = self._last_answer()[0]

    def again(self, outcome: JobOutcome) -> int:
        """Return the number of processes to restart with; 0: do not restart."""
        islands, (number, asked) = 0, self._last_answer()
        if outcome.lost:  # a loss overrides an earlier request
            islands = self._after_loss(outcome)
        elif outcome.code == EXIT_STOPPED and number > self._answered:
            islands = asked
        self._answered = number
        self._processes = islands * ranks_of_island(self._recipe.parallel)
        return self._processes

    def _after_loss(self, outcome: JobOutcome) -> int:
        layout = layout_of(self._recipe.parallel, world_size=self._processes)
        lost = {layout.place(rank)["replicate"] for rank in outcome.lost}
        left = islands_left(self._recipe, most=layout.replicate - len(lost))
        if left:
            self._say(f"{' '.join(outcome.messages)} The run continues with {plural(left, 'island')}.")
        return left

    def _last_answer(self) -> tuple[int, int]:
        """Return the number of the last reply that changed the islands, and its islands; (0, 0): none."""
        run = Path(self._recipe.run.dir)
        if not (run / CONTROL_FOLDER).is_dir():
            return 0, 0
        return max(((found.number, found.islands) for found in answers(run) if found.islands), default=(0, 0))

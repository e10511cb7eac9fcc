"""Compare the ranks' own times: which one do the others wait for?

A rank's own time in a step is all of it but what it was blocked on communication. In a step of fully
sharded data parallel all ranks end together, so the wall time says nothing of who was slow.
"""

import logging
from statistics import median

from penstock.obs.meter import Rates
from penstock.obs.sinks import Record
from penstock.parallel.mesh import World

log = logging.getLogger(__name__)


class Stragglers:
    """Adds up this rank's own times, and holds them against the others' now and then.

    Args:
        every: steps between comparisons; 0: never.
        ratio: of the slowest rank's time to the median's, from which on it is named.
    """

    def __init__(self, world: World, *, every: int, ratio: float) -> None:
        self._world, self._every, self._ratio = world, every, ratio
        self._own_s, self._steps = 0.0, 0

    def add(self, rates: Rates, *, step: int) -> list[Record]:
        """Count a step; return a record where it is time to compare. Every rank must call it."""
        self._own_s += rates.step_s * (1 - rates.shares.get("communication", 0.0))
        self._steps += 1
        if not self._every or step % self._every or self._world.ranks.world_size == 1:
            return []
        own_s, self._own_s, steps, self._steps = self._own_s, 0.0, self._steps, 0
        who = self._world.ranks
        times = self._world.sum(
            *(own_s / steps if rank == who.rank else 0.0 for rank in range(who.world_size))
        )
        slowest = max(range(who.world_size), key=times.__getitem__)
        middle = median(times)
        if times[slowest] >= self._ratio * middle and self._world.is_first:
            said = "the others wait for rank=%d own_s=%.3f median_s=%.3f steps=%d to %d"
            log.warning(said, slowest, times[slowest], middle, step - steps + 1, step)
        return [
            {
                "event": "ranks",
                "step": step,
                "slowest_rank": slowest,
                "slowest_s": times[slowest],
                "median_s": middle,
            }
        ]

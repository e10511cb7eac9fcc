"""Round robin over lanes of unequal length, in closed form.

In each round every lane that still has rows gives one, in lane order. Lanes of equal length run out together,
so there are as many cases as different lengths.
"""

from collections.abc import Sequence

import numpy as np

from penstock.core.arrays import Int64


class RoundRobin:
    """Round robin over lanes of given lengths.

    Args:
        sizes: rows of each lane, zero or more.

    >>> turns = RoundRobin([2, 3])
    >>> lanes, rows = turns.locate(np.arange(5))
    >>> lanes.tolist(), rows.tolist()
    ([0, 1, 0, 1, 1], [0, 0, 1, 1, 2])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.array(sizes, dtype=np.int64)
        self.num_samples = int(self._sizes.sum())
        # Rounds after which a lane runs out. Not np.unique, whose first call imports for 6 milliseconds.
        levels = np.array(sorted({0, *sizes}), dtype=np.int64)
        self._first_rounds = levels[:-1]
        self._widths = np.array([(self._sizes > first).sum() for first in self._first_rounds], dtype=np.int64)
        self._lanes = [np.flatnonzero(self._sizes > first) for first in self._first_rounds]
        ends = np.cumsum(np.diff(levels) * self._widths)
        self._firsts = np.concatenate(([0], ends[:-1])) if len(ends) else ends  # first sample of each case

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return the lane and the row within the lane of samples [n]."""
        case = np.searchsorted(self._firsts, samples, side="right") - 1
        round_, position = np.divmod(samples - self._firsts[case], self._widths[case])
        lane = position
        for index in np.unique(case).tolist():
            lane[case == index] = self._lanes[index][position[case == index]]
        return lane, self._first_rounds[case] + round_

    def sample_of(self, lane: int, row: int) -> int:
        """Return the sample of a lane's row: the inverse of `locate`."""
        case = int(np.searchsorted(self._first_rounds, row, side="right")) - 1
        position = int(np.searchsorted(self._lanes[case], lane))
        return int(self._firsts[case] + (row - self._first_rounds[case]) * self._widths[case] + position)

    def taken(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each lane."""
        if samples >= self.num_samples:
            return [int(size) for size in self._sizes]
        case = int(np.searchsorted(self._firsts, samples, side="right")) - 1
        rounds, position = divmod(samples - int(self._firsts[case]), int(self._widths[case]))
        taken = np.minimum(self._sizes, int(self._first_rounds[case]) + rounds)
        taken[self._lanes[case][:position]] += 1
        return [int(count) for count in taken]

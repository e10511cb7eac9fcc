"""How lanes of unequal length take turns: a round robin, as arithmetic.

In each round every lane that has rows left gives one, in lane order. Lanes of equal length fall out
together, so there are as few cases as there are different lengths.
"""

from collections.abc import Sequence

import numpy as np

from penstock.data.types import Int64


class Turns:
    """A round robin over lanes.

    Args:
        sizes: rows of each lane, zero or more.

    >>> turns = Turns([2, 3])
    >>> lanes, rows = turns.locate(np.arange(5))
    >>> lanes.tolist(), rows.tolist()
    ([0, 1, 0, 1, 1], [0, 0, 1, 1, 2])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.array(sizes, dtype=np.int64)
        self.num_samples = int(self._sizes.sum())
        # Rounds after which a lane falls out. Not np.unique, whose first call imports for 6 milliseconds.
        levels = np.array(sorted({0, *sizes}), dtype=np.int64)
        self._first_rounds = levels[:-1]
        self._widths = np.array([(self._sizes > first).sum() for first in self._first_rounds], dtype=np.int64)
        self._lanes = [np.flatnonzero(self._sizes > first) for first in self._first_rounds]
        ends = np.cumsum(np.diff(levels) * self._widths)
        self._firsts = np.concatenate(([0], ends[:-1])) if len(ends) else ends  # first sample of each case

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return the lane and the row in it of samples [n]."""
        case = np.searchsorted(self._firsts, samples, side="right") - 1
        round_, place = np.divmod(samples - self._firsts[case], self._widths[case])
        lane = place
        for index in np.unique(case).tolist():
            lane[case == index] = self._lanes[index][place[case == index]]
        return lane, self._first_rounds[case] + round_

    def sample_of(self, lane: int, row: int) -> int:
        """Return the sample that is a lane's row: the inverse of `locate`."""
        case = int(np.searchsorted(self._first_rounds, row, side="right")) - 1
        place = int(np.searchsorted(self._lanes[case], lane))
        return int(self._firsts[case] + (row - self._first_rounds[case]) * self._widths[case] + place)

    def taken(self, samples: int) -> list[int]:
        """Return how many rows of each lane are among the first samples."""
        if samples >= self.num_samples:
            return [int(size) for size in self._sizes]
        case = int(np.searchsorted(self._firsts, samples, side="right")) - 1
        rounds, place = divmod(samples - int(self._firsts[case]), int(self._widths[case]))
        taken = np.minimum(self._sizes, int(self._first_rounds[case]) + rounds)
        taken[self._lanes[case][:place]] += 1
        return [int(count) for count in taken]

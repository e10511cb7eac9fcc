"""Lay one row of lengths over another: the cut shared by all packing rules."""

import numpy as np

from penstock.data.types import Int64


def overlay(sources: Int64, targets: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Pour sources into targets, in order, cutting a source wherever a target is full.

    Args:
        sources: [s] int64 lengths, each at least 1.
        targets: [t] int64 capacities, each at least 1, with a sum no less than the sources'.

    Returns:
        Four arrays [p], one entry a piece: source index, offset in the source, length, target index.

    >>> [a.tolist() for a in overlay(np.array([5, 2]), np.array([3, 4]))]
    [[0, 0, 1], [0, 3, 0], [3, 2, 2], [0, 1, 1]]
    """
    source_ends, target_ends = np.cumsum(sources), np.cumsum(targets)
    total = source_ends[-1] if len(source_ends) else 0
    cuts = np.concatenate((source_ends, target_ends))
    cuts.sort(kind="stable")  # two sorted runs: a merge
    starts = np.concatenate((np.zeros(1, dtype=np.int64), cuts[:-1]))
    real = (cuts > starts) & (cuts <= total)  # where both end there is one cut; past the end, none
    cuts, starts = cuts[real], starts[real]
    source = np.searchsorted(source_ends, starts, side="right")
    target = np.searchsorted(target_ends, starts, side="right")
    return source, starts - (source_ends - sources)[source], cuts - starts, target

"""Thinning of curves by largest-triangle-three-buckets (Steinarsson, 2013): points that keep the shape.

Of each bucket of points the one is kept that spans the largest triangle with the one kept before it and
the mean of the bucket after it. A lone spike survives, where a mean or every n-th point would lose it.
"""

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def largest_triangles(x: Float64, y: Float64, points: int) -> Int64:
    """Return the indices of at most `points` points, in order, the first and last among them.

    Args:
        x: [n] increasing.
        y: [n] values; NaN where there is none, which is never kept.
        points: 3 or more.

    >>> largest_triangles(np.arange(9.0), np.array([0, 0, 0, 0, 9.0, 0, 0, 0, 0]), 3).tolist()
    [0, 4, 8]
    """
    kept = np.flatnonzero(np.isfinite(y))
    if len(kept) <= points:
        return kept
    x, y = x[kept], y[kept]
    scale = np.ptp(y) or 1.0
    y, x = (y - y.min()) / scale, (x - x[0]) / (x[-1] - x[0] or 1.0)  # areas of small units would underflow
    edges = np.linspace(1, len(x) - 1, points - 1).astype(np.int64)
    mean_x = np.append(np.add.reduceat(x, edges[:-1]) / np.diff(edges), x[-1])
    mean_y = np.append(np.add.reduceat(y, edges[:-1]) / np.diff(edges), y[-1])
    chosen = np.zeros(points, dtype=np.int64)
    at = 0
    for bucket in range(points - 2):
        first, past = edges[bucket], edges[bucket + 1]
        next_x, next_y = mean_x[bucket + 1], mean_y[bucket + 1]
        areas = np.abs(
            (x[at] - next_x) * (y[first:past] - y[at]) - (x[at] - x[first:past]) * (next_y - y[at])
        )
        at = int(first + areas.argmax())
        chosen[bucket + 1] = at
    chosen[-1] = len(x) - 1
    return np.asarray(kept[chosen], dtype=np.int64)

"""Series for charts: downsampling and smoothing, so that a million steps cost as much as 400."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.obs.report.history import Float64

MAX_POINTS = 400
"""Points per series, about one per 1.5 pixels of the widest chart; more would not be visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of a chart; each represents one value, or a bucket of neighbouring steps."""

    steps: Float64
    """[points] ascending; the middle of a bucket."""
    low: Float64
    """[points] minimum of each bucket."""
    mean: Float64
    """[points]"""
    high: Float64
    """[points] maximum of each bucket."""

    @property
    def is_bucketed(self) -> bool:
        """True if points represent more than one value."""
        return self.low is not self.high


def shrink(steps: Float64, values: Float64, *, limit: int = MAX_POINTS) -> Series:
    """Return a series of at most `limit` points; values that are not finite are left out.

    Buckets hold equal numbers of values, give or take one, so a spike always shows in `high`.


    >>> series = shrink(np.arange(6.0), np.array([1, 9, 2, np.nan, 4, 6]), limit=2)
    >>> series.low.tolist(), series.mean.tolist(), series.high.tolist()
    ([1.0, 2.0], [5.0, 4.0], [9.0, 6.0])
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) <= limit:
        return Series(steps=steps, low=values, mean=values, high=values)
    edges = np.linspace(0, len(values), limit + 1).astype(np.int64)
    starts, sizes = edges[:-1], np.diff(edges)
    return Series(
        steps=np.add.reduceat(steps, starts) / sizes,
        low=np.minimum.reduceat(values, starts),
        mean=np.add.reduceat(values, starts) / sizes,
        high=np.maximum.reduceat(values, starts),
    )


def smooth(values: Float64, *, window: int, breaks: Sequence[int] = ()) -> Float64:
    """Return the centred moving average of width `window`, narrower at the ends.

    Centred, so that it does not lag like an exponential average; values that are not finite are ignored.

    Args:
        breaks: ascending positions that no window crosses.


    >>> smooth(np.array([0.0, 3.0, 6.0, 0.0]), window=3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    if breaks:
        return np.concatenate([smooth(part, window=window) for part in np.split(values, breaks)])
    half = window // 2
    finite = np.isfinite(values)
    totals = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    places = np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    number = counts[last] - counts[first]
    mean: Float64 = np.where(number > 0, (totals[last] - totals[first]) / np.maximum(number, 1), np.nan)
    return mean


def window_for(num_values: int) -> int:
    """Return the smoothing window: a fiftieth of the values, odd, at least 5.

    >>> window_for(60), window_for(10_000)
    (5, 201)
    """
    return max(5, num_values // 50 | 1)

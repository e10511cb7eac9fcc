"""Curves of a run over steps, tokens, time or money, thinned to the points of a screen."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from penstock.obs.run_data.columns import ELAPSED, RunData
from penstock.obs.thin import Float64, Int64, largest_triangles

Axis = Literal["step", "tokens", "time", "money"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time", "money")
_COLUMNS: dict[Axis, str] = {"step": "step", "tokens": "tokens", "time": ELAPSED, "money": "device_hours"}
_MIN_POINTS = 32


class Curves(NamedTuple):
    """Some metrics of a run over one axis."""

    x: Float64
    """[points] ascending."""
    series: dict[str, Float64]
    """Metric -> [points] values that were recorded; NaN: none."""
    means: dict[str, Float64]
    """Metric -> [points] means of the records around each point; {}: no record is left out.

    Thinned points are extremes more often than not, so what smooths a curve takes these.
    """


def sampled(
    columns: RunData,
    names: Iterable[str],
    x: Axis,
    *,
    price: float = 0.0,
    first: float | None = None,
    last: float | None = None,
    points: int,
    kept_steps: Sequence[float] = (),
) -> Curves:
    """Return some metrics over an axis.

    Each metric keeps the points that its own shape needs; all metrics of a table have values at all of them.
    The loss chooses half of them: beside any number of other metrics, its spikes stay apart.

    Args:
        price: of a device-hour, for "money".
        first: lower end of a range of the axis.
        last: upper end.
        points: number of records from which a table is thinned to about as many.
        kept_steps: steps whose last record before them is kept.
    """
    names = list(names)
    tables: dict[str, list[str]] = {}
    for name in names:
        tables.setdefault(columns.table_of(name), []).append(name)
    parts, is_thinned = [], False
    for table, members in tables.items():
        axis = axis_of(columns, x, table=table, price=price)
        begin = 0 if first is None else int(np.searchsorted(axis, first, side="left"))
        end = len(axis) if last is None else int(np.searchsorted(axis, last, side="right"))
        axis = axis[begin:end]
        values = {name: columns.column(name, table=table)[begin:end] for name in members}
        kept = np.arange(len(axis))
        if len(axis) > points:
            is_thinned = True
            steps = columns.column("step", table=table)[begin:end]
            before = np.searchsorted(steps, kept_steps, side="right") - 1
            chosen = [
                largest_triangles(axis, values[name], number)
                for name, number in _shares(members, points).items()
            ]
            kept = np.unique(np.concatenate([*chosen, before[before >= 0]])).astype(np.int64)
        parts.append(
            (axis[kept], {name: (column[kept], _means(column, kept)) for name, column in values.items()})
        )
    at = np.unique(np.concatenate([axis for axis, _ in parts])) if parts else np.empty(0)
    series, means = ({name: np.full(len(at), np.nan) for name in names} for _ in range(2))
    for axis, found in parts:
        places = np.searchsorted(at, axis)
        for name, (column, mean) in found.items():
            series[name][places], means[name][places] = column, mean
    return Curves(at, series, means if is_thinned else {})


def _means(values: Float64, kept: Int64) -> Float64:
    """Return the means of the records that are nearest to each kept one.

    >>> _means(np.array([0.0, 9.0, 0.0, 0.0, np.nan]), np.array([1, 3])).tolist()
    [4.5, 0.0]
    """
    if not len(kept):
        return np.empty(0)
    edges = np.concatenate(([0], (kept[:-1] + kept[1:] + 1) // 2))
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges)
    numbers = np.add.reduceat(known.astype(np.float64), edges)
    means: Float64 = np.divide(sums, numbers, out=np.full(len(kept), np.nan), where=numbers > 0)
    return means


def _shares(metrics: list[str], points: int) -> dict[str, int]:
    """Return how many points each metric chooses.

    >>> _shares(["loss", "mfu", "hfu"], 1000)
    {'loss': 500, 'mfu': 250, 'hfu': 250}
    """
    weights = dict.fromkeys(metrics, 1)
    if "loss" in weights:
        weights["loss"] = max(1, len(metrics) - 1)
    whole = sum(weights.values())
    return {name: max(_MIN_POINTS, points * weight // whole) for name, weight in weights.items()}


def axis_of(columns: RunData, x: Axis, *, table: str = "steps", price: float = 0.0) -> Float64:
    """Return the axis of a table's records; never decreasing.

    Args:
        price: of a device-hour, for "money".
    """
    steps = columns.column("step", table=table)
    if x == "step":
        return steps
    of_steps = columns.column(_COLUMNS[x])
    if x == "money":
        of_steps = of_steps * price
    if table != "steps":
        number = columns.column("step")
        of_steps = np.interp(steps, number, of_steps) if len(number) else np.zeros(len(steps))
    return np.maximum.accumulate(np.nan_to_num(of_steps))  # an older version may lack some


def last_value(columns: RunData, name: str, x: Axis, *, price: float, at: float) -> float | None:
    """Return the last finite value of a metric up to a place of the axis; None: there is none."""
    table = columns.table_of(name)
    past = int(np.searchsorted(axis_of(columns, x, table=table, price=price), at, side="right"))
    column = columns.column(name, table=table)[:past]
    known = np.flatnonzero(np.isfinite(column))
    return float(column[known[-1]]) if len(known) else None


def as_json(values: Float64) -> list[float | None]:
    """Return numbers as JSON has them: null for NaN and infinities."""
    known = np.isfinite(values)
    if known.all():
        return values.tolist()  # type: ignore[no-any-return]
    return [value if good else None for value, good in zip(values.tolist(), known.tolist(), strict=True)]

"""Route of curves: some metrics of a run over steps, tokens or time, thinned to the points of a screen."""

from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request

from penstock.console.state import console_of, run_of
from penstock.core.errors import UsageError
from penstock.core.toml import listed_names
from penstock.obs.run_data.columns import ELAPSED, RunData
from penstock.obs.thin import Float64, largest_triangles

router = APIRouter(prefix="/api")

Axis = Literal["step", "tokens", "time", "money"]
_COLUMNS: dict[Axis, str] = {"step": "step", "tokens": "tokens", "time": ELAPSED, "money": "device_hours"}
_MOST_METRICS = 200
_FEWEST_POINTS = 32


@router.get("/runs/{run_id}/curves")
def curves(
    request: Request,
    run_id: str,
    metrics: str,
    x: Axis = "step",
    first: Annotated[float | None, Query(alias="from")] = None,
    last: Annotated[float | None, Query(alias="to")] = None,
    points: Annotated[int, Query(ge=3, le=100_000)] = 1000,
) -> dict[str, Any]:  # Any: JSON
    """Return curves of metrics, named with commas between; of few records between `from` and `to`, all."""
    columns, price = _opened(request, run_id, x)
    at, series, is_thinned = sampled(
        columns, _names(metrics), x, price=price, first=first, last=last, points=points
    )
    return {
        "x": as_json(at),
        "series": {name: as_json(column) for name, column in series.items()},
        "thinned": is_thinned,
        "generation": columns.generation,
    }


@router.get("/runs/{run_id}/values")
def values(request: Request, run_id: str, metrics: str, at: float, x: Axis = "step") -> dict[str, Any]:
    """Return {metric: value} at a place of the axis: of the last record up to it that has one; null: none."""
    columns, price = _opened(request, run_id, x)
    return {"values": {name: last_value(columns, name, x, price=price, at=at) for name in _names(metrics)}}


def last_value(columns: RunData, name: str, x: Axis, *, price: float, at: float) -> float | None:
    """Return the last finite value of a metric up to a place of the axis; None: there is none."""
    table = columns.table_of(name)
    past = int(np.searchsorted(axis_of(columns, x, table=table, price=price), at, side="right"))
    column = columns.column(name, table=table)[:past]
    known = np.flatnonzero(np.isfinite(column))
    return float(column[known[-1]]) if len(known) else None


def _opened(request: Request, run_id: str, x: Axis) -> tuple[RunData, float]:
    """Return the columns of a run and its price of a device-hour.

    Raises:
        UsageError: the axis is money, and the price is not known.
    """
    console, run = console_of(request), run_of(request, run_id)
    columns, price = console.columns(run), console.summaries.price(run)
    if x == "money" and not price:
        raise UsageError(
            "The cost of this run is not known",
            got=run.name,
            fix="Start `penstock console` with --price, or set run.device_hour_price in the recipe.",
        )
    return columns, price


def _names(metrics: str) -> list[str]:
    names = [*dict.fromkeys(listed_names(metrics))]
    if len(names) > _MOST_METRICS:
        raise UsageError(
            "Too many metrics for one request",
            got=len(names),
            fix=f"Request at most {_MOST_METRICS} at a time.",
        )
    return names


def sampled(
    columns: RunData,
    names: list[str],
    x: Axis,
    *,
    price: float = 0.0,
    first: float | None,
    last: float | None,
    points: int,
) -> tuple[Float64, dict[str, Float64], bool]:
    """Return the common axis of some metrics, their values on it (NaN: none), and whether it is thinned.

    Each metric keeps the points that its own shape needs; all metrics of a table have values at all of them.
    The loss chooses half of them: beside any number of other metrics, its spikes stay apart.
    """
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
        if len(axis) > points:
            is_thinned = True
            chosen = [
                largest_triangles(axis, values[name], number)
                for name, number in _shares(members, points).items()
            ]
            kept = np.unique(np.concatenate(chosen))
        else:
            kept = np.arange(len(axis))
        parts.append((axis[kept], {name: column[kept] for name, column in values.items()}))
    at = np.unique(np.concatenate([axis for axis, _ in parts])) if parts else np.empty(0)
    series = {}
    for axis, found in parts:
        places = np.searchsorted(at, axis)
        for name, column in found.items():
            series[name] = np.full(len(at), np.nan)
            series[name][places] = column
    return at, {name: series[name] for name in names}, is_thinned


def _shares(metrics: list[str], points: int) -> dict[str, int]:
    """Return how many points each metric chooses.

    >>> _shares(["loss", "mfu", "hfu"], 1000)
    {'loss': 500, 'mfu': 250, 'hfu': 250}
    """
    weights = dict.fromkeys(metrics, 1)
    if "loss" in weights:
        weights["loss"] = max(1, len(metrics) - 1)
    whole = sum(weights.values())
    return {name: max(_FEWEST_POINTS, points * weight // whole) for name, weight in weights.items()}


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


def as_json(values: Float64) -> list[float | None]:
    """Return numbers as JSON has them: null for NaN and infinities."""
    known = np.isfinite(values)
    if known.all():
        return values.tolist()  # type: ignore[no-any-return]
    return [value if good else None for value, good in zip(values.tolist(), known.tolist(), strict=True)]

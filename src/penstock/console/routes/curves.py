"""Route of curves: some metrics of a run over steps, tokens or time, thinned to the points of a screen."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from penstock.console.state import Console, ConsoleState, Run
from penstock.core.config import listed_names
from penstock.core.errors import UsageError
from penstock.obs.run_data.columns import RunData
from penstock.obs.run_data.curves import Axis, as_json, last_value, sampled
from penstock.obs.run_data.discover import FoundRun

router = APIRouter(prefix="/api")

_MAX_METRICS = 200


def _opened(console: ConsoleState, run: FoundRun, x: Axis) -> tuple[RunData, float]:
    """Return the columns of a run and its price of a device-hour.

    Raises:
        UsageError: the axis is money, and the price is not known.
    """
    columns, price = console.columns(run), console.summaries.price(run)
    if x == "money" and not price:
        raise UsageError(
            "The cost of this run is not known",
            got=run.name,
            fix="Start `penstock console` with --price, or set run.device_hour_price in the recipe.",
        )
    return columns, price


@router.get("/runs/{run_id}/curves")
def curves(
    console: Console,
    run: Run,
    metrics: str,
    x: Axis = "step",
    first: Annotated[float | None, Query(alias="from")] = None,
    last: Annotated[float | None, Query(alias="to")] = None,
    points: Annotated[int, Query(ge=3, le=100_000)] = 1000,
) -> dict[str, Any]:  # Any: JSON
    """Return curves of metrics, named with commas between; of few records between `from` and `to`, all.

    Where records are left out, `means` has the means of the records around each point.
    """
    columns, price = _opened(console, run, x)
    found = sampled(columns, _names(metrics), x, price=price, first=first, last=last, points=points)
    return {
        "x": as_json(found.x),
        "series": {name: as_json(column) for name, column in found.series.items()},
        "means": {name: as_json(column) for name, column in found.means.items()},
        "generation": columns.generation,
    }


@router.get("/runs/{run_id}/values")
def values(console: Console, run: Run, metrics: str, at: float, x: Axis = "step") -> dict[str, Any]:
    """Return {metric: value} at a place of the axis: of the last record up to it that has one; null: none."""
    columns, price = _opened(console, run, x)
    return {"values": {name: last_value(columns, name, x, price=price, at=at) for name in _names(metrics)}}


def _names(metrics: str) -> list[str]:
    names = [*dict.fromkeys(listed_names(metrics))]
    if len(names) > _MAX_METRICS:
        raise UsageError(
            "Too many metrics for one request",
            got=len(names),
            fix=f"Request at most {_MAX_METRICS} at a time.",
        )
    return names

"""Routes of runs: the table, one run without its curves, its sample answers, the comparison of two."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from penstock.console.state import Console, Run, run_of
from penstock.obs.run_data.page_json import answers_json, comparison_json, run_json

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON values


@router.get("/runs")
def runs(console: Console, search: str = "") -> Reply:
    """Return the table's rows; with `search`, of runs whose name or recipe contains all its words."""
    return {"runs": console.rows(search)}


@router.get("/runs/{run_id}")
def run(console: Console, found: Run) -> Reply:
    """Return a run: its row, recipe, charts, events and summary, and whether it may be controlled."""
    data = console.columns(found)  # before the row, which has the ranks of what is read
    reply = run_json(found, console.row(found), data, console.summaries.recipe(found))
    return {**reply, "control": console.rules.control and not found.files.is_stored}


@router.get("/runs/{run_id}/answers")
def answers(console: Console, run: Run) -> Reply:
    """Return the prompts of [samples], and what the model answered to them by step."""
    return answers_json(console.columns(run))


@router.get("/runs/{run_id}/compare")
def compare(console: Console, run: Run, other: Annotated[str, Query(alias="with")]) -> Reply:
    """Return the metrics of two runs that cannot be compared, and sentences that say why."""
    runs = run, run_of(other, console)
    return comparison_json([(one, console.columns(one), console.summaries.recipe(one)) for one in runs])

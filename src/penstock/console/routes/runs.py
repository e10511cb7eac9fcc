"""Routes of runs: the table, one run without its curves, its sample answers, the comparison of two."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from penstock.console.state import console_of, run_of
from penstock.obs.run_data.page_json import answers_json, comparison_json, run_json

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON values


@router.get("/runs")
def runs(request: Request, search: str = "") -> Reply:
    """Return the table's rows; with `search`, of runs whose name or recipe contains all its words."""
    return {"runs": console_of(request).rows(search)}


@router.get("/runs/{run_id}")
def run(request: Request, run_id: str) -> Reply:
    """Return a run: its row, recipe, charts, events and summary, and whether it may be controlled."""
    console, found = console_of(request), run_of(request, run_id)
    data = console.columns(found)  # before the row, which has the ranks of what is read
    reply = run_json(found, console.row(found), data, console.summaries.recipe(found))
    return {**reply, "control": console.rules.control and not found.files.is_stored}


@router.get("/runs/{run_id}/answers")
def answers(request: Request, run_id: str) -> Reply:
    """Return the prompts of [samples], and what the model answered to them by step."""
    return answers_json(console_of(request).columns(run_of(request, run_id)))


@router.get("/runs/{run_id}/compare")
def compare(request: Request, run_id: str, other: Annotated[str, Query(alias="with")]) -> Reply:
    """Return the metrics of two runs that cannot be compared, and sentences that say why."""
    console = console_of(request)
    runs = run_of(request, run_id), run_of(request, other)
    return comparison_json([(run, console.columns(run), console.summaries.recipe(run)) for run in runs])

"""Routes of runs: the table, and all but the curves of one run."""

from typing import Any

from fastapi import APIRouter, Request

from penstock.console.state import console_of, run_of
from penstock.obs.run_data.page_json import run_json

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

"""Route of a comparison: which metrics of two runs cannot be compared, and why."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from penstock.console.state import console_of, run_of
from penstock.obs.run_data.page_json import comparison_json

router = APIRouter(prefix="/api")


@router.get("/runs/{run_id}/compare")
def compare(request: Request, run_id: str, other: Annotated[str, Query(alias="with")]) -> dict[str, Any]:
    """Return the names of the metrics that cannot be compared, and sentences that say why. Any: JSON."""
    console = console_of(request)
    runs = run_of(request, run_id), run_of(request, other)
    return comparison_json([(run, console.columns(run), console.summaries.recipe(run)) for run in runs])

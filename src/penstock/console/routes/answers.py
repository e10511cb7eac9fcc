"""Route of sample answers: the prompts of [samples], and what the model said to them by step."""

from typing import Any

from fastapi import APIRouter, Request

from penstock.console.state import console_of, run_of
from penstock.obs.run_data.page_json import answers_json

router = APIRouter(prefix="/api")


@router.get("/runs/{run_id}/answers")
def answers(request: Request, run_id: str) -> dict[str, Any]:
    """Return the prompts and their answers by step. Any: JSON."""
    return answers_json(console_of(request).columns(run_of(request, run_id)))

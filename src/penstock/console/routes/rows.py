"""Routes of rows: what a step trained on, and the loss of each token under the nearest checkpoint.

Losses need a model in memory, so they are a POST, which no page of another origin can send, and are allowed
where models may be opened (`ConsoleAccess.why_no_models`).
"""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.console.access import refusal
from penstock.console.models.checkpoints import nearest_before, steps_of
from penstock.console.models.open import ScoringModel
from penstock.console.models.slot import ModelKey
from penstock.console.runs.discover import FoundRun
from penstock.console.runs.step_rows import (
    FIRST_ROWS,
    MOST_ROWS,
    RowLosses,
    open_rows,
    rows_as_json,
    rows_at_once,
)
from penstock.console.state import ConsoleState, console_of, run_of
from penstock.core.errors import UsageError
from penstock.train.inspect.open_run import OpenRun
from penstock.train.inspect.step_rows import StepRows

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON values


class RowsWanted(BaseModel):
    """Rows of a step to score."""

    model_config = ConfigDict(extra="forbid")

    offset: int = Field(default=0, ge=0, le=10**9)
    limit: int = Field(default=1, ge=1, le=MOST_ROWS)


@router.get("/runs/{run_id}/rows/{step}")
def rows(
    request: Request,
    run_id: str,
    step: int,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = FIRST_ROWS,
) -> Reply:
    """Return some rows of a step: documents, text, learned tokens, and losses that were computed before."""
    console, run = console_of(request), run_of(request, run_id)
    opened, found = open_rows(run.folder, step, offset=offset, limit=limit)
    known = console.losses.of((run.id, console.columns(run).generation), found)
    return _reply(console, run, opened, found, offset=offset, losses=known)


@router.post("/runs/{run_id}/rows/{step}/losses", response_model=None)
def losses(request: Request, run_id: str, step: int, wanted: RowsWanted) -> Reply | Response:
    """Return the same with the loss of each token under the checkpoint nearest to the step.

    One request at a time; a second one is refused with 409.
    """
    console, run = console_of(request), run_of(request, run_id)
    if why := console.rules.why_no_models:
        return refusal(403, why)
    opened, found = open_rows(run.folder, step, offset=wanted.offset, limit=wanted.limit)
    if why := _why_no_losses(opened):
        raise UsageError(why)
    nearest = nearest_before(steps_of(run.folder), step)
    if nearest is None:
        raise UsageError(
            "The run has no checkpoint, so there is no model to compute losses with",
            fix="Wait for its first one.",
        )
    scored: list[RowLosses] = []
    if found.rows:
        key = ModelKey("losses", run.id, nearest, run.name)
        with console.models.lent(key, lambda: ScoringModel(run.folder, nearest), is_shared=False) as model:
            scored = [RowLosses(nearest, each.copy()) for each in model.losses(found.batch)]
        console.losses.add((run.id, console.columns(run).generation), found, scored)
    return _reply(console, run, opened, found, offset=wanted.offset, losses=scored)


def _reply(
    console: ConsoleState,
    run: FoundRun,
    opened: OpenRun,
    found: StepRows,
    *,
    offset: int,
    losses: Sequence[RowLosses | None],
) -> Reply:
    nearest = nearest_before(steps_of(run.folder), found.step)
    return {
        **rows_as_json(opened, found, console.columns(run), offset=offset, losses=losses),
        "steps": opened.steps,
        "limit": rows_at_once(opened, found.step),
        "checkpoint": nearest,
        "why_no_losses": console.rules.why_no_models
        or _why_no_losses(opened)
        or ("" if nearest is not None else "The run has no checkpoint to compute losses with."),
    }


def _why_no_losses(opened: OpenRun) -> str:
    tune = opened.recipe.tune
    if tune is not None and tune.is_preference:
        return f"This run trains on preferences (tune.loss {tune.loss!r}), not on the loss of tokens"
    return ""

"""Routes of rows: what a step trained on, and the loss of each token under the nearest checkpoint.

Losses need a model in memory, so they are a POST, which no page of another origin can send, and are allowed
where models may be opened (`ConsoleAccess.why_no_models`).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.console.access import refusal
from penstock.console.state import Console, ConsoleState, Run
from penstock.console.workers.model_process import ModelProcess
from penstock.console.workers.model_slot import MAX_CONTEXT, ModelKey
from penstock.core.errors import PenstockError, UsageError
from penstock.obs.run_data.discover import FoundRun
from penstock.obs.run_data.step_rows import RowLosses, note_of, shown_rows

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON values

_MAX_ROWS, _FIRST_ROWS = 16, 4
_PROMPTS_AT_ONCE = 128
"""Documents of one request to a model."""


class RowsWanted(BaseModel):
    """Rows of a step to score."""

    model_config = ConfigDict(extra="forbid")

    offset: int = Field(default=0, ge=0, le=10**9)
    limit: int = Field(default=1, ge=1, le=_MAX_ROWS)


@router.get("/runs/{run_id}/rows/{step}")
def rows(
    console: Console,
    run: Run,
    step: int,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
    limit: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = _FIRST_ROWS,
) -> Reply:
    """Return some rows of a step: documents, text, learned tokens, and losses that were computed before."""
    found = console.data.ask("rows", run.folder, step=step, offset=offset, limit=limit)
    known = console.losses.of((run.id, console.columns(run).generation), found)
    return _reply(console, run, found, known)


@router.post("/runs/{run_id}/rows/{step}/losses", response_model=None)
def losses(console: Console, run: Run, step: int, wanted: RowsWanted) -> Reply | Response:
    """Return the same with the loss of each token under the checkpoint nearest to the step."""
    if why := console.rules.why_no_models:
        return refusal(403, why)
    found = console.data.ask("rows", run.folder, step=step, offset=wanted.offset, limit=wanted.limit)
    if why := _why_no_losses(found):
        raise UsageError(why)
    longest = max((len(part["ids"]) for row in found["rows"] for part in row["documents"]), default=0)
    scored: list[RowLosses] = []
    if longest:
        with _nearest_model(console, run, step, context=max(longest + 1, MAX_CONTEXT)) as (nearest, model):
            scored = [RowLosses(nearest, _losses_of(row, model)) for row in found["rows"]]
        console.losses.add((run.id, console.columns(run).generation), found, scored)
    return _reply(console, run, found, scored)


@contextmanager
def _nearest_model(
    console: ConsoleState, run: FoundRun, step: int, *, context: int
) -> Iterator[tuple[int, ModelProcess]]:
    """Context manager: the checkpoint nearest to a step; the next one if the job deletes it meanwhile."""
    gone: set[int] = set()
    with ExitStack() as lent:
        while True:
            nearest = nearest_before([one for one in _checkpoints(console, run) if one not in gone], step)
            if nearest is None:
                raise UsageError(
                    "The run has no checkpoint, so there is no model to compute losses with",
                    fix="Wait for its first one.",
                )
            key = ModelKey(run.folder, nearest, run.name)
            try:
                model = lent.enter_context(console.models.lent(key, context=context))
                break
            except PenstockError:
                gone.add(nearest)
                if nearest in _checkpoints(console, run):
                    raise
        yield nearest, model


def _checkpoints(console: ConsoleState, run: FoundRun) -> list[int]:
    steps: list[int] = console.data.ask("checkpoints", run.folder)["steps"]
    return steps


def nearest_before(steps: Sequence[int], step: int) -> int | None:
    """Return the checkpoint whose weights are closest to those that a step began with.

    The last one before the step; without one, the first after it. None: there is none.

    >>> nearest_before([4, 8, 12], 9), nearest_before([4, 8], 4), nearest_before([], 4)
    (8, 4, None)
    """
    before = [one for one in steps if one < step]
    return max(before) if before else min(steps, default=None)


def _losses_of(row: Reply, model: ModelProcess) -> list[list[float | None]]:
    """Return the loss of each token of a row's documents; attention stays within them, as in training."""
    found: list[list[float | None]] = [[None] * len(part["ids"]) for part in row["documents"]]
    scored = [number for number, own in enumerate(found) if len(own) > 1]
    for first in range(0, len(scored), _PROMPTS_AT_ONCE):
        part = scored[first : first + _PROMPTS_AT_ONCE]
        prompts = [row["documents"][number]["ids"] for number in part]
        body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0}
        for number, choice in zip(part, model.post("/v1/completions", body)["choices"], strict=True):
            told, learned = choice["logprobs"]["token_logprobs"], row["documents"][number]["learned"]
            found[number] = [
                None if not counts or told is None else round(-told, 4)
                for told, counts in zip(told, learned, strict=True)
            ]
    return found


def _reply(console: ConsoleState, run: FoundRun, found: Reply, losses: Sequence[RowLosses | None]) -> Reply:
    columns = console.columns(run)
    steps = columns.column("step")
    note = note_of(found, steps_recorded=int(steps[-1]) if len(steps) else 0, events=columns.events)
    nearest = nearest_before(_checkpoints(console, run), found["step"])
    return {
        **shown_rows(found, note=note, losses=losses),
        "steps": found["steps"],
        "limit": found["limit"],
        "checkpoint": nearest,
        "why_no_losses": console.rules.why_no_models
        or _why_no_losses(found)
        or ("" if nearest is not None else "The run has no checkpoint to compute losses with."),
    }


def _why_no_losses(found: Reply) -> str:
    if (loss := found["tune_loss"]) is not None:
        return f"This run trains on preferences (tune.loss {loss!r}), not on the loss of tokens"
    return ""

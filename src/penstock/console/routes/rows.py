"""Routes of rows: what a step trained on, and the loss of each token under the nearest checkpoint.

Losses need a model in memory, so they are a POST, which no page of another origin can send, and are allowed
where models may be opened (`ConsoleAccess.why_no_models`).
"""

import math
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.console.access import refusal
from penstock.console.models.checkpoints import nearest_before, steps_of
from penstock.console.models.open import ScoringModel
from penstock.console.models.slot import ModelKey
from penstock.console.runs.discover import FoundRun
from penstock.console.runs.opened import opened_run
from penstock.console.runs.token_texts import pieces_of, token_texts
from penstock.console.state import ConsoleState, console_of, finite, run_of
from penstock.core.errors import UsageError
from penstock.core.files import TOKENIZER_FILE
from penstock.text.tokenizer import Tokenizer
from penstock.train.data_setup import tokenizer_of
from penstock.train.inspect.open_run import OpenRun
from penstock.train.inspect.step_rows import ROW_FIELDS, RowDocument, StepRow, StepRows, rows_of_step

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON values

_MOST_ROWS = 16
_MOST_TOKENS = 16_384
"""Tokens of a page of rows; one row may have more."""


class RowsWanted(BaseModel):
    """Rows of a step to score."""

    model_config = ConfigDict(extra="forbid")

    offset: int = Field(default=0, ge=0, le=10**9)
    limit: int = Field(default=1, ge=1, le=_MOST_ROWS)


@router.get("/runs/{run_id}/rows/{step}")
def rows(
    request: Request,
    run_id: str,
    step: int,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
    limit: Annotated[int, Query(ge=1, le=_MOST_ROWS)] = 4,
) -> Reply:
    """Return some rows of a step: documents, text, learned tokens."""
    console, run = console_of(request), run_of(request, run_id)
    opened, found = _rows(run, step, offset=offset, limit=limit)
    return _reply(console, run, opened, found, offset=offset, losses=None)


@router.post("/runs/{run_id}/rows/{step}/losses", response_model=None)
def losses(request: Request, run_id: str, step: int, wanted: RowsWanted) -> Reply | Response:
    """Return the same with the loss of each token under the checkpoint nearest to the step.

    One request at a time; a second one is refused with 409.
    """
    console, run = console_of(request), run_of(request, run_id)
    if why := console.rules.why_no_models:
        return refusal(403, why)
    opened, found = _rows(run, step, offset=wanted.offset, limit=wanted.limit)
    if why := _why_no_losses(opened):
        raise UsageError(why)
    nearest = nearest_before(steps_of(run.folder), step)
    if nearest is None:
        raise UsageError("The run has no checkpoint, so there is no model to compute losses with")
    scored = None
    if found.rows:
        key = ModelKey("losses", run.id, nearest, run.name)
        with console.models.lent(key, lambda: ScoringModel(run.folder, nearest), is_shared=False) as model:
            scored = model.losses(found.batch)
    return _reply(console, run, opened, found, offset=wanted.offset, losses=scored)


def _rows(run: FoundRun, step: int, *, offset: int, limit: int) -> tuple[OpenRun, StepRows]:
    opened = opened_run(run.folder, fields=ROW_FIELDS)
    opened.check_step(step)
    length = opened.loader.sequence_length_at(step - 1)
    most = max(1, min(limit, _MOST_TOKENS // length))
    return opened, rows_of_step(opened, step, first=offset, most=most)


def _why_no_losses(opened: OpenRun) -> str:
    tune = opened.recipe.tune
    if tune is not None and tune.is_preference:
        return f"This run trains on preferences (tune.loss {tune.loss!r}), not on the loss of tokens"
    return ""


def _reply(
    console: ConsoleState,
    run: FoundRun,
    opened: OpenRun,
    found: StepRows,
    *,
    offset: int,
    losses: npt.NDArray[np.float32] | None,
) -> Reply:
    tokenizer = _tokenizer(opened)
    nearest = nearest_before(steps_of(run.folder), found.step)
    return {
        "step": found.step,
        "steps": opened.steps,
        "num_rows": found.num_rows,
        "offset": offset,
        "limit": max(1, _MOST_TOKENS // opened.loader.sequence_length_at(found.step - 1)),
        "note": _note(console, run, opened, found.step),
        "rows": [
            _row_of(row, tokenizer, None if losses is None else losses[index])
            for index, row in enumerate(found.rows)
        ],
        "checkpoint": nearest,
        "why_no_losses": console.rules.why_no_models
        or _why_no_losses(opened)
        or ("" if nearest is not None else "The run has no checkpoint to compute losses with."),
    }


def _note(console: ConsoleState, run: FoundRun, opened: OpenRun, step: int) -> str:
    """Return what a reader has to know of a step; empty: it was trained as usual."""
    columns = console.columns(run)
    known = columns.column("step")
    taken = max(int(known[-1]) if len(known) else 0, opened.loader.step)
    if step > taken:
        return (
            f"Step {step:,} is yet to come: the run has taken {taken:,}. These are its rows if nothing is "
            "changed until then."
        )
    why = [event["text"] for event in columns.events if event["kind"] == "skip" and event["step"] == step]
    if why:
        return f"This step was skipped ({why[-1]}): its rows were read, and did not change the weights."
    return ""


def _tokenizer(opened: OpenRun) -> Tokenizer | None:
    own = opened.folder / TOKENIZER_FILE
    path = own if own.is_file() else tokenizer_of(opened.loader)
    return None if path is None else Tokenizer.load(path)


def _row_of(row: StepRow, tokenizer: Tokenizer | None, losses: npt.NDArray[np.float32] | None) -> Reply:
    documents = [_document_of(document, tokenizer, losses) for document in row.documents]
    spans = [document.span for document in row.documents if document.span.corpus]
    return {
        "row": row.row,
        "sample": row.sample,
        "corpus": spans[0].corpus if spans else "",
        "epoch": spans[0].epoch + 1 if spans else None,
        "loss": None if losses is None else _mean(losses),
        "documents": documents,
    }


def _document_of(
    document: RowDocument, tokenizer: Tokenizer | None, losses: npt.NDArray[np.float32] | None
) -> Reply:
    span, number = document.span, document.span.tokens
    if not span.corpus:
        return {"document": None, "tokens": number, "pieces": []}
    own: list[float | None] | None = None
    if losses is not None:  # a label, and its loss, stand one place before their token
        before = losses[document.first : document.first + number - 1].tolist()
        own = [None, *(None if math.isnan(loss) else round(loss, 4) for loss in before)][:number]
    learned = document.is_learned.tolist()
    if number > 1:
        learned[0] = learned[1]  # nothing precedes it, so no loss counts it: it is shown like what follows
    return {
        "document": span.document,
        "corpus": span.corpus,
        "shard": span.shard,
        "offset": span.offset,
        "tokens": number,
        "loss": None if losses is None else _mean(losses[document.first : document.first + number - 1]),
        "pieces": pieces_of(token_texts(tokenizer, document.ids.tolist()), learned, own),
    }


def _mean(losses: npt.NDArray[np.float32]) -> float | None:
    known = losses[~np.isnan(losses)]
    return finite(float(known.mean(dtype=np.float64))) if len(known) else None

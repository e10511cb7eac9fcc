"""Routes of requests to running jobs: send one, list them with their replies, preview a mixture.

What is sent is the file that `penstock control` writes, checked as
they check it; the job decides. Without --control nothing is sent.
"""

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from penstock.console.access import refusal
from penstock.console.runs.columns import RunColumns
from penstock.console.runs.opened import opened_run
from penstock.console.state import console_of, run_of
from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.launch.engines.engine import stop_between_starts
from penstock.launch.job_folder import JobFolder
from penstock.train.control.apply_request import check_possible, in_force, reweighed
from penstock.train.control.requests import (
    ControlReply,
    ControlRequest,
    answered,
    job_is_running,
    open_requests,
    read_answer,
    read_request,
    request_file,
    submit,
)
from penstock.train.inspect.open_run import OpenRun, recipe_of

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON values

_MOST_LISTED = 200


class Asked(BaseModel):
    """Request to a job; which fields it has follows from its kind."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["mixture", "islands", "skip", "stop", "checkpoint", "batch"]
    weights: dict[str, float] | None = None
    at_step: int | None = None
    islands: int | None = None
    first: int | None = Field(default=None, alias="from")
    last: int | None = Field(default=None, alias="to")
    """Last step to skip."""
    batch: int | None = None
    reason: str = ""


class Weights(BaseModel):
    """Shares of some corpora to preview; the others keep their proportions in the rest."""

    model_config = ConfigDict(extra="forbid")

    weights: dict[str, float]


@router.post("/runs/{run_id}/requests", response_model=None)
def ask(request: Request, run_id: str, asked: Asked) -> Reply | Response:
    """Send a request to the run's job; return its number and whether a job runs, or what was done instead."""
    if not console_of(request).rules.control:
        return refusal(403, "This console only reads. Start it with --control to send requests.")
    folder, client = run_of(request, run_id).folder, request.scope["client_name"]
    wanted = replace(_request_of(asked), asked_by=f"console: {client}" if client else "console")
    if wanted.stop and not job_is_running(folder):
        said = stop_between_starts(JobFolder(folder))
        if said and not job_is_running(folder):  # else it trains by now, and may have missed the mark
            return {"said": said}
    if wanted.weights is not None or wanted.skip_steps is not None:
        _check(opened_run(folder), wanted)
    else:
        recipe_of(folder)  # raises for an invalid folder; the corpora may be out of sight
    if (wanted.needs_job or wanted.islands is not None) and not job_is_running(folder):
        return refusal(409, "No job runs on it.")
    return {"number": submit(folder, wanted), "running": job_is_running(folder)}


@router.get("/runs/{run_id}/requests")
def requests(request: Request, run_id: str) -> Reply:
    """Return the newest requests of a run with their replies, newest last, and whether a job may reply."""
    folder = run_of(request, run_id).folder
    running = job_is_running(folder)  # before its replies are read: one that ends may reply to the last
    numbers = {*open_requests(folder), *_answered(folder)}
    return {
        "requests": [_listed(folder, number) for number in sorted(numbers)[-_MOST_LISTED:]],
        "running": running,
    }


@router.get("/runs/{run_id}/mixture")
def mixture(request: Request, run_id: str) -> Reply:
    """Return the mixtures, and how often each corpus will have been read by the end with that in force."""
    return _mixture(request, run_id, None)


@router.post("/runs/{run_id}/mixture")
def preview(request: Request, run_id: str, wanted: Weights) -> Reply:
    """Return what another mixture would mean, from the present step on; nothing is sent to the job."""
    return _mixture(request, run_id, ControlRequest(weights=wanted.weights).weights)


def _check(opened: OpenRun, wanted: ControlRequest) -> None:
    for name in wanted.weights or {}:
        if name not in opened.loader.corpora:
            fix = nearest(name, list(opened.loader.corpora))
            raise UsageError("The run has no such corpus", got=name, fix=fix)
    check_possible(opened.loader, wanted)


def _request_of(asked: Asked) -> ControlRequest:
    why = asked.reason
    match asked.kind:
        case "mixture":
            return ControlRequest(weights=asked.weights or {}, at_step=asked.at_step, reason=why)
        case "islands":
            return ControlRequest(islands=asked.islands or 0, reason=why)
        case "skip":
            steps = (asked.first or 0, (asked.last or 0) + 1)
            return ControlRequest(skip_steps=steps, reason=why)
        case "batch":
            return ControlRequest(batch_size=asked.batch or 0, reason=why)
        case "checkpoint":
            return ControlRequest(checkpoint=True, reason=why)
        case "stop":
            return ControlRequest(stop=True, reason=why)


def _mixture(request: Request, run_id: str, shares: dict[str, float] | None) -> Reply:
    console, run = console_of(request), run_of(request, run_id)
    columns = console.columns(run)
    with console.recent_run.lent(run.folder) as opened:
        return _mixture_of(opened, columns, shares)


def _mixture_of(opened: OpenRun, columns: RunColumns, shares: dict[str, float] | None) -> Reply:
    loader, steps = opened.loader, opened.steps
    known = columns.column("step")
    step = max(int(known[-1]) if len(known) else 0, loader.step)
    now = in_force(loader, min(step, max(steps - 1, 0)))
    weights, later = now, [first for first, _, _ in loader.mixtures if first > step]
    if shares is not None:
        weights = reweighed(now, shares)
        if step < steps:
            loader.set_weights(weights, step=step)
    tokens, epochs, by_end = (
        loader.tokens_by_corpus(step),
        loader.epochs_by_corpus(step),
        loader.epochs_by_corpus(max(steps, step)),
    )
    return {
        "corpora": [
            {
                "name": name,
                "weight": round(weights.get(name, 0.0), 6),
                "tokens": tokens[name],
                "tokens_in_corpus": _size(opened, name),
                "epochs": round(epochs[name], 6),
                "epochs_by_end": round(by_end[name], 6),
                "loss": _last(columns.column(f"corpus_validation_loss/{name}", table="validations")),
            }
            for name in tokens
        ],
        "step": step,
        "steps": steps,
        "tokens_left": loader.tokens_before(max(steps, step)) - loader.tokens_before(step),
        "next_change": min(later, default=None),
        "mixtures": [
            {"after_step": first, "weights": planned} for first, planned, _ in loader.mixtures[-_MOST_LISTED:]
        ],
    }


def _size(opened: OpenRun, name: str) -> int | None:
    corpus = opened.loader.corpora.get(name)
    return None if corpus is None else corpus.num_tokens


def _last(values: Any) -> float | None:  # Any: an array
    known = values[values == values]  # NaN differs from itself
    return float(known[-1]) if len(known) else None


def _answered(folder: Path) -> set[int]:
    with suppress(OSError):
        return answered(folder)
    return set()


def _listed(folder: Path, number: int) -> Reply:
    asked, reply = None, None
    with suppress(PenstockError):
        asked = read_request(folder, number)
    with suppress(PenstockError):
        reply = read_answer(folder, number)
    try:
        stamp = request_file(folder, number).stat().st_mtime
        time = datetime.fromtimestamp(stamp, UTC).isoformat(timespec="seconds")
    except OSError:
        time = None
    kind, text = ("?", "a request that cannot be read") if asked is None else _told(asked)
    return {
        "number": number,
        "kind": kind,
        "text": text,
        "asked_by": asked.asked_by if asked is not None else "",
        "time": time,
        "reason": asked.reason if asked is not None else "",
        "reply": None if reply is None else _replied(reply),
    }


def _told(asked: ControlRequest) -> tuple[str, str]:
    if asked.weights is not None:
        return "mixture", ", ".join(f"{name} {share:.4g}" for name, share in asked.weights.items())
    if asked.skip_steps is not None:
        return "skip", f"steps {asked.skip_steps[0]} to {asked.skip_steps[1] - 1}"
    if asked.islands is not None:
        return "islands", f"{asked.islands} islands"
    if asked.batch_size is not None:
        return "batch", f"{asked.batch_size} rows a step"
    if asked.extend is not None:
        return "extend", f"new parts of {asked.extend}"
    return ("stop", "save and stop") if asked.stop else ("checkpoint", "save now")


def _replied(reply: ControlReply) -> Reply:
    return {
        "taken_up": reply.taken_up,
        "said": reply.said,
        "step": reply.step,
        "holds_from": reply.holds_from,
        "weights": reply.weights,
    }

"""Routes of requests to running jobs: send one, list them with their replies, preview a mixture.

What is sent is the file that `penstock control` writes, checked as it checks it, by the process that answers
questions about runs; the job decides. Without --control nothing is sent.
"""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from penstock.console.access import refusal
from penstock.console.state import Console, ConsoleState, Run
from penstock.obs.run_data.discover import FoundRun

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON values


class Weights(BaseModel):
    """Shares of some corpora to preview; the others keep their proportions in the rest."""

    model_config = ConfigDict(extra="forbid")

    weights: dict[str, float]


@router.post("/runs/{run_id}/requests", response_model=None)
def ask(request: Request, console: Console, run: Run, asked: Reply) -> Reply | Response:
    """Send a request, with the fields of `ControlRequest`, to the run's job.

    Return its number and whether a job runs, or what was done instead.
    """
    if not console.rules.control:
        return refusal(403, "This console is read-only. Start it with --control to send requests.")
    client = request.scope["client_name"]
    asked_by = f"console: {client}" if client else "console"
    return console.data.ask("request", run.folder, asked=asked, asked_by=asked_by)


@router.get("/runs/{run_id}/requests")
def requests(console: Console, run: Run) -> Reply:
    """Return the newest requests of a run with their replies, newest last, and whether a job may reply."""
    return console.data.ask("requests", run.folder)


@router.get("/runs/{run_id}/mixture")
def mixture(console: Console, run: Run) -> Reply:
    """Return the mixtures, and how often each corpus will have been read by the end with that in force."""
    return _mixture(console, run, None)


@router.post("/runs/{run_id}/mixture")
def preview(console: Console, run: Run, wanted: Weights) -> Reply:
    """Return what another mixture would mean, from the present step on; nothing is sent to the job."""
    return _mixture(console, run, wanted.weights)


def _mixture(console: ConsoleState, run: FoundRun, weights: dict[str, float] | None) -> Reply:
    columns = console.columns(run)
    known = columns.column("step")
    step = int(known[-1]) if len(known) else 0
    found = console.data.ask("mixture", run.folder, step=step, weights=weights)
    for corpus in found["corpora"]:
        name = f"corpus_validation_loss/{corpus['name']}"
        corpus["loss"] = _last(columns.column(name, table="validations"))
    return found


def _last(values: Any) -> float | None:  # Any: an array
    known = values[values == values]  # NaN differs from itself
    return float(known[-1]) if len(known) else None

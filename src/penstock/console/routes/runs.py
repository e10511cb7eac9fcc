"""Routes of runs: the table, and all but the curves of one run."""

from typing import Any

from fastapi import APIRouter, Request

from penstock.console.state import console_of, run_of
from penstock.core.toml import flat, plain
from penstock.obs.metric_names import METRICS
from penstock.obs.run_data.columns import RunData
from penstock.obs.run_data.events import RunEvent, spikes

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON values

_GROUPS = (
    ("loss", ("loss",)),
    ("validation", ("validation_",)),
    ("tasks", ("task_",)),
    ("corpus", ("corpus_",)),
    ("speed", ("tokens_per_s", "mfu", "hfu", "step_s")),
    (
        "phases",
        ("data_wait_share", "forward_share", "backward_share", "communication_share", "optimizer_share"),
    ),
    ("optimizer", ("grad_norm", "learning_rate")),
    ("memory", ("memory_bytes",)),
    ("rewards", ("reward_", "log_prob_", "kto_")),
)
"""Group -> beginnings of its metrics' names, in the order of a page."""


@router.get("/runs")
def runs(request: Request, search: str = "") -> Reply:
    """Return the table's rows; with `search`, of runs whose name or recipe contains all its words."""
    return {"runs": console_of(request).rows(search)}


@router.get("/runs/{run_id}")
def run(request: Request, run_id: str) -> Reply:
    """Return a run: recipe, metrics, corpora, events, starts."""
    console, found = console_of(request), run_of(request, run_id)
    columns = console.columns(found)
    metrics = columns.metrics()
    of_corpora = (name.partition("/")[2] for name in metrics if name.startswith("corpus_"))
    return {
        "id": found.id,
        "name": found.name,
        "row": console.row(found),
        "recipe": {key: plain(value) for key, value in flat(console.summaries.recipe(found))},
        "metrics": [_described(name) for name in metrics],
        "corpora": [*dict.fromkeys(of_corpora)],
        "events": events_of(columns),
        "starts": columns.starts,
        "control": console.rules.control and not found.files.is_stored,
        "damaged_lines": columns.num_damaged,
        "generation": columns.generation,
        "cursor": str(columns.cursor),
    }


def events_of(columns: RunData) -> list[RunEvent]:
    """Return all events of a run, in order."""
    steps, loss = columns.column("step"), columns.column("loss")
    found = [*columns.events, *spikes(steps, loss)]
    return sorted(found, key=lambda event: event["step"])


def _described(name: str) -> Reply:
    metric, _, of = name.partition("/")
    unit, meaning = METRICS.get(metric, ("", ""))
    group = next((group for group, starts in _GROUPS if metric.startswith(starts)), "other")
    return {"name": name, "title": f"{metric.replace('_', ' ')}{f' · {of}' if of else ''}", "unit": unit,
            "group": group, "meaning": meaning}  # fmt: skip

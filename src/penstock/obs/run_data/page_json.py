"""JSON that the page of a run reads: the console's routes answer with it, and a report inlines it."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from penstock.core.toml import flat, plain
from penstock.obs.metric_names import METRICS, RANK_METRICS
from penstock.obs.run_data.charts import charts_of
from penstock.obs.run_data.columns import RunData
from penstock.obs.run_data.discover import FoundRun
from penstock.obs.run_data.events import RunEvent, spikes
from penstock.obs.run_data.hangs import HangReports
from penstock.obs.run_data.rank_columns import RankTable
from penstock.obs.run_data.run_files import tokenizer_of
from penstock.obs.run_data.run_row import RunRow
from penstock.obs.run_data.summary import Config, same_peak, setting, starts_of, summary_of

Reply = dict[str, Any]  # Any: JSON values

_MAX_UNREAD = 8
_OF_A_RANK = ("rank", "host", "step", "doing", "stacks")
"""What a page shows of the state of a rank that hung."""


def run_json(run: FoundRun, row: RunRow, data: RunData, recipe: Config) -> Reply:
    """Return a run: its row, recipe, charts, events and summary."""
    metrics = data.metrics()
    return {
        "id": run.id,
        "name": run.name,
        "row": row,
        "recipe": {key: plain(value) for key, value in flat(recipe)},
        "metrics": [_described(name) for name in metrics],
        "charts": charts_of(metrics),
        "events": events_of(data),
        "started": next((start["time"] for start in data.starts if isinstance(start.get("time"), str)), None),
        "summary": summary_of(data, recipe),
        "damaged_lines": data.num_damaged,
        "generation": data.generation,
        "cursor": str(data.cursor),
    }


def events_of(data: RunData) -> list[RunEvent]:
    """Return all events of a run, in order."""
    found = [*data.events, *spikes(data.column("step"), data.column("loss"))]
    return sorted(found, key=lambda event: event["step"])


def _described(name: str) -> Reply:
    unit, meaning = METRICS.get(name.partition("/")[0], ("", ""))
    return {"name": name, "unit": unit, "meaning": meaning}


def answers_json(data: RunData) -> Reply:
    """Return the prompts of [samples] and their answers by step."""
    prompts: dict[str, Reply] = {}
    steps = []
    for record in data.answers():
        steps.append(record["step"])
        found = record.get("answers")
        for answer in found if isinstance(found, list) else []:
            if not isinstance(answer, dict):
                continue
            prompt = str(answer.get("prompt", ""))
            row = prompts.setdefault(prompt, {"prompt": prompt, "reference": None, "answers": []})
            row["reference"] = answer.get("reference") or row["reference"]
            row["answers"].append(
                {
                    "step": record["step"],
                    "answer": str(answer.get("answer", "")),
                    "cut": answer.get("finish") == "length",
                }
            )
    return {"steps": steps, "prompts": [*prompts.values()]}


def ranks_json(table: RankTable, data: RunData, metric: str) -> Reply:
    """Return a metric of RANK_METRICS but its values: means of the ranks, where they ran, and slow ones."""
    return {
        "steps": table.steps,
        "records": table.num_records,
        "num_ranks": len(table.values),
        "means": [mean if math.isfinite(mean) else None for mean in table.means.tolist()],
        "starts": [
            {"column": column, "hosts": places.hosts, "devices": places.devices, "nics": places.nics}
            for column, places in sorted(table.places.items())
        ],
        "slow": [slow._asdict() for slow in data.slow_ranks],
        "metric": metric,
        "metrics": list(RANK_METRICS),
    }


def hangs_json(found: HangReports) -> Reply:
    """Return the diagnosis of each hang, newest last, and the call stacks of the ranks to look at first."""
    return {
        "hangs": [
            {
                "time": datetime.fromtimestamp(hang.at, UTC).isoformat(timespec="seconds"),
                "text": hang.text,
                "num_ranks": hang.num_ranks,
                "ranks": [{name: getattr(words, name) for name in _OF_A_RANK} for words in hang.words],
            }
            for hang in found.hangs
        ],
        "unread": found.unread[:_MAX_UNREAD],
        "num_unread": len(found.unread),
        "num_beyond": found.num_beyond,
    }


def comparison_json(runs: Sequence[tuple[FoundRun, RunData, Config]]) -> Reply:
    """Return which metrics of some runs cannot be compared, and why."""
    left_out, notes = [], []
    if len({tokenizer_of(run.files) or setting(recipe, "model.vocab_size") for run, _, recipe in runs}) > 1:
        left_out += ["loss", "validation_loss"]
        notes.append(
            "Losses in nats per token are not compared: the runs have different tokenizers. Bits per byte "
            "are, where the runs were validated on text."
        )
    starts = [starts_of(data)[-1:] for _, data, _ in runs]
    if not same_peak([found[0].peak_of_each if found else np.nan for found in starts]):
        left_out.append("mfu")
        notes.append("MFU is not compared: the peaks that it is a share of differ, or one is not known.")
    return {"left_out": left_out, "notes": notes}


def plain_json(value: Any) -> Any:  # Any: JSON, and what Python's json reads besides
    """Return JSON that every reader takes: NaN and infinities are null, halves of surrogate pairs escaped.

    >>> plain_json({"peak": float("nan"), "dir": ["caf\\udce9"]})
    {'peak': None, 'dir': ['caf\\\\udce9']}
    """
    if isinstance(value, Mapping):
        return {plain_json(str(name)): plain_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

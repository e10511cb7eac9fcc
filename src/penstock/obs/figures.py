"""Decide what a report says of a run in numbers: how it ended, its key figures, its starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.core.units import duration, mib, si
from penstock.obs.axis import Unit, short
from penstock.obs.history import Float64, History
from penstock.obs.series import window_for

Config = Mapping[str, Any]  # Any: a resolved recipe, as JSON holds it

UNKNOWN = "\u2013"
"""Shown where a number was never recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A key figure."""

    metric: str
    """Its name in obs/names.py."""
    title: str
    value: str
    note: str = ""
    """A second, smaller line."""


def setting(config: Config, dotted: str) -> Any:
    """Return a value of a recipe by its path; None where the recipe lacks it.

    >>> setting({"run": {"steps": 60}}, "run.steps"), setting({}, "run.steps")
    (60, None)
    """
    node: Any = config
    for key in dotted.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def outcome(history: History, config: Config) -> tuple[Literal["finished", "unfinished", "failed"], str]:
    """Return how the run ended, as a kind and in words; a run in progress is an unfinished one."""
    step, wanted = int(history.steps[-1]), setting(config, "run.steps")
    if not np.isfinite(history.columns["loss"][-1]):
        return "failed", f"diverged at step {step:,}"
    if not isinstance(wanted, int):
        return "unfinished", f"{step:,} steps so far"
    if step < wanted:
        return "unfinished", f"{step:,} of {wanted:,} steps so far"
    return "finished", "finished"


def key_figures(history: History, config: Config) -> list[Figure]:
    """Return the figures at the top of the page."""
    columns, step = history.columns, history.steps[-1]
    loss, tokens, wanted = columns["loss"], columns["tokens"][-1], setting(config, "run.steps")
    window = min(window_for(len(loss)), len(loss))
    seconds = float(np.nansum(columns["step_s"]))
    of_all = f"of {wanted:,}, " if isinstance(wanted, int) else ""
    return [
        Figure(
            metric="step",
            title="steps",
            value=f"{step:,.0f}",
            note=f"{of_all}{duration(seconds)} of training",
        ),
        Figure(metric="tokens", title="tokens", value=_count(tokens), note=f"{_count(tokens / step)} a step"),
        Figure(
            metric="loss",
            title="final training loss",
            value=short(loss[-1]),
            note=f"{short(_mean(loss[-window:]))} over the last {window:,} steps",
        ),
        _validation_figure(history),
        _median(columns, "tokens_per_s", "tokens/s"),
        _median(columns, "mfu", "MFU", unit="share"),
        _median(columns, "data_wait_share", "data-wait share", unit="share"),
        Figure(
            metric="memory_bytes",
            title="peak memory",
            value=mib(memory) if (memory := _greatest(columns["memory_bytes"])) else UNKNOWN,
            note="of the first process",
        ),
    ]


def _validation_figure(history: History) -> Figure:
    losses = history.validation_loss
    name = "validation_loss"
    if not len(losses):
        return Figure(metric=name, title="validation loss", value=UNKNOWN, note="not validated")
    first, last = short(losses[0]), short(losses[-1])
    return Figure(
        metric=name,
        title="validation loss",
        value=f"{first} → {last}" if len(losses) > 1 else last,
        note=f"best of {len(losses):,}: {short(-_greatest(-losses))}" if len(losses) > 1 else "once",
    )


def _median(columns: Mapping[str, Float64], name: str, title: str, *, unit: Unit = "number") -> Figure:
    values = columns[name][np.isfinite(columns[name])]
    if not len(values):
        return Figure(metric=name, title=f"median {title}", value=UNKNOWN)
    low, middle, high = (float(part) for part in np.quantile(values, (0.1, 0.5, 0.9)))
    percent = partial(short, unit="share")
    write, roughly = (percent, percent) if unit == "share" else (_count, si)
    note = f"{roughly(low)} to {roughly(high)} in 80% of steps"
    return Figure(metric=name, title=f"median {title}", value=write(middle), note=note)


def starts(history: History) -> list[tuple[str, ...]]:
    """Return a row per start: its step, processes and time, the steps taken from it and their median rate."""
    ends = [start.step for start in history.starts[1:]] + [int(history.steps[-1])]
    rows: list[tuple[str, ...]] = []
    for start, end in zip(history.starts, ends, strict=False):  # a log without starts has one end too many
        within = (history.steps > start.step) & (history.steps <= end)
        rates = history.columns["tokens_per_s"][within]
        rates = rates[np.isfinite(rates)]
        rate = _count(float(np.median(rates))) if len(rates) else UNKNOWN
        when = start.time.replace("T", " ").removesuffix("+00:00")
        rows.append((f"{start.step:,}", f"{start.ranks:,}", when, f"{int(within.sum()):,}", rate))
    return rows


def _greatest(values: Float64) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else 0.0


def _mean(values: Float64) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def _count(value: float) -> str:
    if not np.isfinite(value):
        return UNKNOWN
    return short(value) if value < 1000 else f"{value:,.0f}" if value < 1e6 else si(value)

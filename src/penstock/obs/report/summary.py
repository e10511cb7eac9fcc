"""Summary of a report: the run's outcome, its key figures, its starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.core.units import Unit, duration, flops, mib, short, si
from penstock.obs.report.charts import window_for
from penstock.obs.report.history import History
from penstock.obs.thin import Float64

Config = Mapping[str, Any]  # Any: a resolved recipe, as JSON holds it

_ALL_LEARNED = 0.97
"""Share of learned tokens from which all are: the last token of a row has no label."""
_SAME_PEAK = 0.1
"""Maximum ratio of the measured peaks of one kind of hardware."""
UNKNOWN = "\u2013"
"""Text for a number that was never recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Key figure with its title and value."""

    metric: str
    """Name in obs/metric_names.py."""
    title: str
    value: str
    note: str = ""
    """Second, smaller line."""


def setting(config: Config, dotted: str) -> Any:
    """Return a recipe's setting by its dotted path; None if it is missing.

    >>> setting({"run": {"steps": 60}}, "run.steps"), setting({}, "run.steps")
    (60, None)
    """
    node: Any = config
    for key in dotted.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def outcome(history: History, config: Config) -> tuple[Literal["finished", "unfinished", "failed"], str]:
    """Return how the run ended: its kind and a text; a run in progress counts as unfinished."""
    step, wanted = int(history.steps[-1]), setting(config, "run.steps")
    if not np.isfinite(history.columns["loss"][-1]):
        return "failed", f"diverged at step {step:,}"
    if not isinstance(wanted, int):
        return "unfinished", f"{step:,} steps so far"
    if (early := history.early_end) is not None:
        return "finished", f"stopped early, best at step {early.best_step:,}"
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
        *_learned_figure(history, config),
        Figure(
            metric="loss",
            title="final training loss",
            value=short(loss[-1]),
            note=f"{short(_mean(loss[-window:]))} over the last {window:,} steps",
        ),
        _validation_figure(history),
        *_bits_figure(history),
        _median(columns, "tokens_per_s", "tokens/s"),
        _mfu_figure(history),
        _median(columns, "data_wait_share", "data-wait share", unit="share"),
        Figure(
            metric="memory_bytes",
            title="peak memory",
            value=mib(memory) if (memory := _greatest(columns["memory_bytes"])) else UNKNOWN,
            note="of the first process",
        ),
    ]


def _learned_figure(history: History, config: Config) -> list[Figure]:
    """Return the number of learned tokens, if some tokens are not to be learned; or of answers."""
    columns = history.columns
    if np.isfinite(columns["reward_margin"]).any():
        answers = columns["labels"]
        title = "answers" if setting(config, "tune.loss") == "kto" else "pairs of answers"
        note = f"{np.nanmean(answers):,.1f}".removesuffix(".0") + " a step"
        return [Figure(metric="labels", title=title, value=f"{np.nansum(answers):,.0f}", note=note)]
    labels, tokens = columns["labels"], np.diff(columns["tokens"], prepend=0.0)
    known = np.isfinite(labels) & (np.arange(len(labels)) > 0)  # the first record may follow lost ones
    total = float(tokens[known].sum())
    if not total or (share := float(labels[known].sum()) / total) > _ALL_LEARNED:
        return []
    note = f"{short(share, unit='share')} of the tokens"
    return [
        Figure(metric="labels", title="learned tokens", value=_count(float(np.nansum(labels))), note=note)
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


def _bits_figure(history: History) -> list[Figure]:
    bits = history.validation_bits[np.isfinite(history.validation_bits)]
    if not len(bits):
        return []
    first, last = short(bits[0]), short(bits[-1])
    value = f"{first} → {last}" if len(bits) > 1 else last
    note = "the same measure for any tokenizer"
    return [Figure(metric="validation_bits_per_byte", title="bits per byte", value=value, note=note)]


def same_peak(peaks: Sequence[float]) -> bool:
    """Return True if all peaks are known and of the same hardware: measurements differ by a few percent.

    >>> same_peak([1e12, 1.04e12]), same_peak([1e12, 2e12]), same_peak([1e12, float("nan")])
    (True, False, False)
    """
    return all(np.isfinite(peaks)) and max(peaks) <= (1 + _SAME_PEAK) * min(peaks)


def _mfu_figure(history: History) -> Figure:
    """Return the MFU since the peak that it is relative to last changed."""
    since = 0
    if history.starts:
        last = history.starts[-1]
        for start in reversed(history.starts):
            if start is not last and not same_peak([start.peak_of_each, last.peak_of_each]):
                break
            since = start.step
    found = _median(history.columns, "mfu", "MFU", unit="share", where=history.steps > since)
    if not history.starts or not last.device:  # an old log without peaks
        return found
    if np.isnan(last.peak_flops):
        return replace(found, value=UNKNOWN, note="the peak could not be measured without other load")
    note = f"of {flops(last.peak_flops)}" + (f", from step {since:,} on" if since else "")
    return replace(found, note=note)


def _median(
    columns: Mapping[str, Float64],
    name: str,
    title: str,
    *,
    unit: Unit = "number",
    where: npt.NDArray[np.bool_] | None = None,
) -> Figure:
    values = columns[name] if where is None else columns[name][where]
    values = values[np.isfinite(values)]
    if not len(values):
        return Figure(metric=name, title=f"median {title}", value=UNKNOWN)
    low, middle, high = (float(part) for part in np.quantile(values, (0.1, 0.5, 0.9)))
    percent = partial(short, unit="share")
    write, roughly = (percent, percent) if unit == "share" else (_count, si)
    note = f"{roughly(low)} to {roughly(high)} in 80% of steps"
    return Figure(metric=name, title=f"median {title}", value=write(middle), note=note)


def starts(history: History) -> list[tuple[str, ...]]:
    """Return a row per start: step, processes, time, steps taken, median rate, peak, changes."""
    ends = [start.step for start in history.starts[1:]] + [int(history.steps[-1])]
    rows: list[tuple[str, ...]] = []
    for start, end in zip(history.starts, ends, strict=False):  # without starts there is one end too many
        within = (history.steps > start.step) & (history.steps <= end)
        rates = history.columns["tokens_per_s"][within]
        rates = rates[np.isfinite(rates)]
        rate = _count(float(np.median(rates))) if len(rates) else UNKNOWN
        when = start.time.replace("T", " ").removesuffix("+00:00")
        peak = flops(start.peak_flops) if np.isfinite(start.peak_flops) else UNKNOWN
        changed = "; ".join(f"{name} {before} → {now}" for name, before, now in start.changes)
        rows.append(
            (f"{start.step:,}", f"{start.ranks:,}", when, f"{int(within.sum()):,}", rate, peak, changed)
        )
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

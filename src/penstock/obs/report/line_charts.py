"""Line charts of a report: series, smoothing, scales, marks and descriptions."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from penstock.core.units import plural
from penstock.obs.report.axis import Scale, Unit, short
from penstock.obs.report.history import Float64, History
from penstock.obs.report.series import Series, shrink, smooth, window_for
from penstock.obs.report.svg import Chart, Layer, Mark

Smoothing = Literal["none", "through starts", "between starts"]
"""Metrics smoothed only between starts: speed jumps where the number of processes changes."""

_MAX_VALIDATIONS = 200
_LOG_NORM, _LOG_LOSS = 20.0, 100.0
"""Ratio of maximum to median from which a log scale is used, so that a spike hides nothing else."""


def charts(history: History, references: Mapping[str, float]) -> list[Chart]:
    """Return the charts, the loss first; a metric that was never recorded has none.

    Args:
        references: name -> loss, drawn as horizontal lines.
    """
    found = [
        _loss_chart(history, references),
        _bits_chart(history),
        _reward_chart(history, "reward_margin", "Margin of rewards"),
        _reward_chart(history, "reward_accuracy", "Accuracy of rewards", unit="share"),
        _reward_chart(history, "reward_chosen", "Reward of chosen answers"),
        _reward_chart(history, "reward_rejected", "Reward of rejected answers"),
        _chart(history, "tokens_per_s", "Tokens per second", from_zero=True, smoothing="between starts"),
        _chart(
            history,
            "data_wait_share",
            "Data-wait share",
            from_zero=True,
            smoothing="between starts",
            unit="share",
        ),
        _chart(history, "learning_rate", "Learning rate", from_zero=True, smoothing="none"),
        _chart(
            history,
            "grad_norm",
            "Gradient norm",
            from_zero=True,
            scale=_scale(history.columns["grad_norm"], log_from=_LOG_NORM),
        ),
    ]
    return [chart for chart in found if any(len(layer.series.steps) for layer in chart.layers)]


def _loss_chart(history: History, references: Mapping[str, float]) -> Chart:
    layers = _layers(history, "loss", name="training")
    text = _described("Training loss", history.steps, history.columns["loss"])
    if len(history.validation_loss):
        series = shrink(history.validation_steps, history.validation_loss, limit=_MAX_VALIDATIONS)
        layers.append(Layer(name="validation", series=series, style="dots"))
        text += f" {_described('Validation loss', history.validation_steps, history.validation_loss)}"
    return Chart(
        key="loss",
        title="Loss, nats per answer" if _has_rewards(history) else "Loss, nats per token",
        description=" ".join(
            [text, *(f"{mark.text.capitalize()}{mark.where}." for mark in _marks(history)[:10])]
        ),
        layers=layers,
        first_step=_first_step(history),
        last_step=float(history.steps[-1]),
        marks=_marks(history),
        levels=tuple(references.items()),
        scale=_scale(
            np.concatenate((history.columns["loss"], history.validation_loss, [*references.values()])),
            log_from=_LOG_LOSS,
        ),
    )


def _bits_chart(history: History) -> Chart:
    steps, bits = history.validation_steps, history.validation_bits
    series = shrink(steps, bits, limit=_MAX_VALIDATIONS)
    title = "Held-out text, bits per byte"
    return Chart(
        key="bits-per-byte",
        title=title,
        description=_described(title, steps, bits),
        layers=[Layer(name="validation", series=series, style="dots")],
        first_step=_first_step(history),
        last_step=float(history.steps[-1]),
        marks=[Mark(step=mark.step, text=mark.text, is_labelled=False) for mark in _marks(history)],
    )


def _reward_chart(history: History, metric: str, title: str, *, unit: Unit = "number") -> Chart:
    """Return a chart of training with the held-out values as dots."""
    chart = _chart(history, metric, title, from_zero=unit == "share", unit=unit)
    steps, values = history.validation_steps, history.validation_rewards[metric]
    if not np.isfinite(values).any():
        return chart
    dots = Layer(name="validation", series=shrink(steps, values, limit=_MAX_VALIDATIONS), style="dots")
    said = _described(f"{title}, held out", steps, values, unit=unit)
    return replace(chart, layers=[*chart.layers, dots], description=f"{chart.description} {said}")


def _chart(
    history: History,
    metric: str,
    title: str,
    *,
    from_zero: bool,
    smoothing: Smoothing = "through starts",
    scale: Scale = "linear",
    unit: Unit = "number",
) -> Chart:
    marks = [Mark(step=mark.step, text=mark.text, is_labelled=False) for mark in _marks(history)]
    return Chart(
        key=metric.replace("_", "-"),
        title=title,
        description=_described(title, history.steps, history.columns[metric], unit=unit),
        layers=_layers(history, metric, name="each step", smoothing=smoothing),
        first_step=_first_step(history),
        last_step=float(history.steps[-1]),
        marks=marks,
        from_zero=from_zero,
        scale=scale,
        unit=unit,
    )


def _layers(
    history: History, metric: str, *, name: str, smoothing: Smoothing = "through starts"
) -> list[Layer]:
    steps, values = history.steps, history.columns[metric]
    if smoothing == "none":
        return [Layer(name=name, series=shrink(steps, values), style="smooth")]
    window = window_for(len(values))
    each = shrink(steps, values)
    if len(values) < 2 * window:
        return [Layer(name=name, series=each, style="smooth")]
    raw = Layer(name=f"{name}, with its range" if each.is_bucketed else name, series=each, style="raw")
    later = [start.step for start in history.starts[1:]] if smoothing == "between starts" else []
    breaks = np.searchsorted(steps, later, side="right").tolist()
    mean = shrink(steps, smooth(values, window=window, breaks=breaks))
    return [raw, Layer(name=f"mean of {window:,} steps", series=mean, style="smooth")]


def _has_rewards(history: History) -> bool:
    return bool(np.isfinite(history.columns["reward_accuracy"]).any())


def _marks(history: History) -> list[Mark]:
    """Return a mark for each start but the first; those with changes are labelled."""
    marks = []
    for before, start in pairwise(history.starts):
        rescaled = [f"{before.ranks} → {start.ranks} processes"] if before.ranks != start.ranks else []
        changed = [f"{name.rpartition('.')[2]} {old} → {new}" for name, old, new in start.changes]
        if rescaled and changed:
            changed = [plural(len(changed), "setting")]  # the table of starts has them all
        elif changed[1:]:
            changed = [changed[0], f"{len(changed) - 1} more"]
        text = ", ".join([*rescaled, *changed])
        marks.append(Mark(step=start.step, text=text or "restarted", is_labelled=bool(text)))
    return marks


def _first_step(history: History) -> float:
    return min(float(history.steps[0]), *(start.step for start in history.starts[:1]), np.inf)


def _scale(values: Float64, *, log_from: float) -> Scale:
    values = values[np.isfinite(values)]
    if not len(values) or values.min() <= 0:
        return "linear"
    return "log" if values.max() > log_from * np.median(values) else "linear"


def _described(title: str, steps: Float64, values: Float64, *, unit: Unit = "number") -> str:
    series: Series = shrink(steps, values, limit=len(values))
    if not len(series.mean):
        return f"{title}: no finite value."
    first, last, least, most = (
        short(float(value), unit=unit)
        for value in (series.mean[0], series.mean[-1], series.mean.min(), series.mean.max())
    )
    return (
        f"{title}: {first} at step {series.steps[0]:,.0f}, {last} at step {series.steps[-1]:,.0f}, "
        f"between {least} and {most}."
    )

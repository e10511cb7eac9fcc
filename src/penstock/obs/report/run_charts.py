"""Charts of one run: which there are, their marks and descriptions; shares as stacked areas.

Each area between two kept records has the exact share of its tokens, so the mixture's chart shows what was
served, not the requested weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from penstock.core.units import Unit, plural, short
from penstock.obs.report.charts import Chart, Layer, Mark, dots, line
from penstock.obs.report.history import REWARDS, History, MixturePoint
from penstock.obs.thin import Float64

Smoothing = Literal["none", "through starts", "between starts"]
"""Metrics smoothed only between starts: speed jumps where the number of processes changes."""

_TRAINING, _HELD_OUT = "--train", "--held"
"""Colours."""
_LOG_NORM, _LOG_LOSS = 20.0, 100.0
"""Ratio of maximum to median from which a log scale is used, so that a spike hides nothing else."""
_MOST_CORPORA = 7
"""Number of the largest corpora drawn by name; the others are one area."""
_OTHERS = "others"
_MOST_MARKS = 100
_MOST_STRETCHES = 100
_REWARD_TITLES: dict[str, tuple[str, Unit]] = {
    "reward_margin": ("Margin of rewards", "number"),
    "reward_accuracy": ("Accuracy of rewards", "share"),
    "reward_chosen": ("Reward of chosen answers", "number"),
    "reward_rejected": ("Reward of rejected answers", "number"),
}
_PHASES = (
    ("forward", "forward", 0),
    ("backward", "backward", 4),
    ("optimizer", "optimizer", 2),
    ("communication", "blocked on communication", 1),
    ("data_wait", "waiting for data", 3),
)
"""Phase, its label and colour; useful work is at the bottom."""


def run_charts(history: History, references: Mapping[str, float]) -> Iterator[Chart]:
    """Yield the charts, the loss first; one of a metric that was never recorded has no points.

    Args:
        references: name -> loss, drawn as horizontal lines.
    """
    yield _loss_chart(history, references)
    yield _bits_chart(history)
    for metric in REWARDS:
        title, unit = _REWARD_TITLES[metric]
        yield _reward_chart(history, metric, title, unit=unit)
    yield _chart(history, "tokens_per_s", "Tokens per second", from_zero=True, smoothing="between starts")
    yield _chart(
        history,
        "data_wait_share",
        "Data-wait share",
        from_zero=True,
        smoothing="between starts",
        unit="share",
    )
    yield _chart(history, "learning_rate", "Learning rate", from_zero=True, smoothing="none")
    is_log = _needs_log(history.columns["grad_norm"], log_from=_LOG_NORM)
    yield _chart(history, "grad_norm", "Gradient norm", from_zero=True, is_log=is_log)
    yield phase_chart(history)
    yield mixture_chart(history)


def phase_chart(history: History) -> Chart:
    """Return the chart of where a step's time goes: means over at most a hundred stretches of steps."""
    columns = np.stack([history.columns[f"{phase}_share"] for phase, _, _ in _PHASES], axis=1)
    known = np.isfinite(columns).all(axis=1)
    steps, columns = history.steps[known], columns[known]
    layers, said = [], ""
    if len(steps):
        edges = np.unique(np.linspace(0, len(steps), min(len(steps), _MOST_STRETCHES) + 1).astype(np.int64))
        means = np.add.reduceat(columns, edges[:-1]) / np.diff(edges)[:, None]
        ends = np.concatenate((steps[:1] - 1, steps[edges[1:] - 1]))
        layers = [
            _area(name, ends, means[:, part], color=color) for part, (_, name, color) in enumerate(_PHASES)
        ]
        whole = zip(_PHASES, columns.mean(axis=0), strict=True)
        said = ", ".join(f"{name} {short(float(share), unit='share')}" for (_, name, _), share in whole)
    return Chart(
        key="phases",
        title="Where a step's time goes",
        description=f"Where a step's time goes, on average: {said}; the rest is in none of them.",
        layers=layers,
        is_wide=True,
        is_stepped=True,
        unit="share",
    )


def mixture_chart(
    history: History, *, key: str = "mixture", title: str = "Mixture, share of tokens"
) -> Chart:
    """Return the chart of the served mixture over tokens; without layers if there is only one corpus."""
    points = (MixturePoint(0, 0, {}), *history.mixture)
    names = _corpora(history)
    layers = []
    if len(history.corpus_tokens) > 1 and points[-1].tokens > 0:
        ends = np.array([point.tokens for point in points], dtype=np.float64)
        shares = np.array([_shares(early, late, names) for early, late in pairwise(points)])
        layers = [_area(name, ends, shares[:, part], color=part) for part, name in enumerate(names)]
    changes = history.mixture_changes
    return Chart(
        key=key,
        title=title,
        description=_mixture_described(history, names, title),
        layers=layers,
        along="tokens",
        marks=[
            Mark(change.tokens, f"{change.reason} from step {change.step:,}")
            for change in changes[:: -(-len(changes) // _MOST_MARKS) or 1]  # a mixing policy makes hundreds
        ],
        is_wide=True,
        is_stepped=True,
        unit="share",
    )


def _loss_chart(history: History, references: Mapping[str, float]) -> Chart:
    loss = history.columns["loss"]
    marks = _marks(history)
    title = "Loss, nats per answer" if _has_rewards(history) else "Loss, nats per token"
    said = [f"{title}. {_described('Training', history.steps, loss)}"]
    layers = [line(history.steps, loss, name="training", color=_TRAINING)]
    if len(history.validation_loss):
        layers.append(
            dots(history.validation_steps, history.validation_loss, name="validation", color=_HELD_OUT)
        )
        said.append(_described("Validation", history.validation_steps, history.validation_loss))
    said += [f"{mark.text.capitalize()} at step {mark.at:,.0f}." for mark in marks[:10]]
    values = np.concatenate((loss, history.validation_loss, [*references.values()]))
    return Chart(
        key="loss",
        title=title,
        description=" ".join(said),
        layers=layers,
        marks=marks,
        levels=tuple(references.items()),
        is_log=_needs_log(values, log_from=_LOG_LOSS),
        is_wide=True,
    )


def _bits_chart(history: History) -> Chart:
    title = "Held-out text, bits per byte"
    steps, bits = history.validation_steps, history.validation_bits
    return Chart(
        key="bits-per-byte",
        title=title,
        description=_described(title, steps, bits),
        layers=[dots(steps, bits, name="validation", color=_HELD_OUT)],
        marks=_unlabelled(history),
    )


def _reward_chart(history: History, metric: str, title: str, *, unit: Unit) -> Chart:
    """Return a chart of training with the held-out values as dots."""
    steps, values = history.validation_steps, history.validation_rewards[metric]
    held_out = np.isfinite(values).any()
    said = _described(f"{title}, held out", steps, values, unit=unit) if held_out else ""
    also = [dots(steps, values, name="validation", color=_HELD_OUT)] if held_out else []
    return _chart(history, metric, title, from_zero=unit == "share", unit=unit, also=also, said=said)


def _chart(
    history: History,
    metric: str,
    title: str,
    *,
    from_zero: bool,
    smoothing: Smoothing = "through starts",
    is_log: bool = False,
    unit: Unit = "number",
    also: Sequence[Layer] = (),
    said: str = "",
) -> Chart:
    values = history.columns[metric]
    later = [start.step for start in history.starts[1:]] if smoothing == "between starts" else []
    breaks = np.searchsorted(history.steps, later, side="right").tolist()
    drawn = line(
        history.steps,
        values,
        name="each step",
        color=_TRAINING,
        is_smoothed=smoothing != "none",
        breaks=breaks,
    )
    return Chart(
        key=metric.replace("_", "-"),
        title=title,
        description=f"{_described(title, history.steps, values, unit=unit)} {said}".strip(),
        layers=[drawn, *also],
        marks=_unlabelled(history),
        from_zero=from_zero,
        is_log=is_log,
        unit=unit,
    )


def _area(name: str, ends: Float64, shares: Float64, *, color: int) -> Layer:
    """Return one of several stacked areas.

    Args:
        ends: [segments + 1] boundaries of the segments.
        shares: [segments] the share in each.
    """
    return Layer(name=name, x=ends, y=np.concatenate((shares[:1], shares)), style="area", color=color)


def _corpora(history: History) -> list[str]:
    ordered = sorted(history.corpus_tokens, key=lambda name: (-history.corpus_tokens[name], name))
    if len(ordered) <= _MOST_CORPORA + 1:
        return ordered
    return [*ordered[:_MOST_CORPORA], _OTHERS]


def _shares(early: MixturePoint, late: MixturePoint, names: Sequence[str]) -> list[float]:
    total = max(late.tokens - early.tokens, 1)
    found = [(late.by_corpus.get(name, 0) - early.by_corpus.get(name, 0)) / total for name in names]
    if names[-1] == _OTHERS and _OTHERS not in late.by_corpus:
        found[-1] = 1 - sum(found[:-1])
    return found


def _mixture_described(history: History, names: Sequence[str], title: str) -> str:
    total = max(sum(history.corpus_tokens.values()), 1)
    parts = [
        f"{name} {short(history.corpus_tokens[name] / total, unit='share')}"
        for name in names
        if name in history.corpus_tokens
    ]
    changes = plural(len(history.mixture_changes), "time")
    return f"{title}. Shares of all tokens: {', '.join(parts)}. The mixture changed {changes}."


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
        marks.append(Mark(start.step, text or "restarted", is_labelled=bool(text)))
    return marks


def _unlabelled(history: History) -> list[Mark]:
    return [Mark(mark.at, mark.text) for mark in _marks(history)]


def _needs_log(values: Float64, *, log_from: float) -> bool:
    values = values[np.isfinite(values)]
    if not len(values) or values.min() <= 0:
        return False
    return bool(values.max() > log_from * np.median(values))


def _described(title: str, steps: Float64, values: Float64, *, unit: Unit = "number") -> str:
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if not len(values):
        return f"{title}: no finite value."
    first, last, least, most = (
        short(float(value), unit=unit) for value in (values[0], values[-1], values.min(), values.max())
    )
    return (
        f"{title}: {first} at step {steps[0]:,.0f}, {last} at step {steps[-1]:,.0f}, "
        f"between {least} and {most}."
    )

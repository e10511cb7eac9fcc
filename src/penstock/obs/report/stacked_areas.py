"""Stacked area charts: the mixture over tokens, the phases of a step over steps.

Each segment between two kept records has the exact share of its tokens, so the areas show what was served,
not the requested weights.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from penstock.core.units import plural
from penstock.obs.report.axis import Axis, short
from penstock.obs.report.history import History, MixtureChange, MixturePoint
from penstock.obs.report.svg import axis_name

_PLACES = 1000
_EDGE = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Areas:
    """Data of a stacked area chart."""

    key: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    description: str
    """Alternative text for readers who cannot see the chart."""
    names: Sequence[str]
    """Names of the parts, the lowest first."""
    axis: Axis
    ends: Sequence[float]
    """[segments + 1] boundaries of the segments on the axis."""
    steps: Sequence[int]
    """[segments] last step of each."""
    shares: Sequence[Sequence[float]]
    """[segments][parts] shares, summing to at most 1."""
    along: str = "step"
    """Quantity on the horizontal axis."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines: position on the axis, and text."""


def draw_areas(chart: Areas) -> str:
    """Return the chart as an HTML `figure` element."""
    key, title = escape(chart.key), escape(chart.title)
    edges = [chart.axis.place(end) for end in chart.ends]
    areas = "".join(
        f'<path class="area a{part}" d="{_area(edges, _stacked(chart.shares, part))}"/>'
        for part in range(len(chart.names))
    )
    legend = "".join(
        f'<li><i class="area a{i}"></i>{escape(name)}</li>' for i, name in enumerate(chart.names)
    )
    marks = "".join(_mark(chart.axis.place(place), text) for place, text in chart.marks)
    return (
        f'<figure class="chart" id="{key}"><figcaption><h3>{title}</h3>'
        f'<ul class="legend">{legend}</ul></figcaption>'
        '<div class="plot" tabindex="0" style="padding-top:8px">'
        f'<svg role="img" aria-labelledby="{key}-title {key}-text">'
        f'<title id="{key}-title">{title}</title>'
        f'<desc id="{key}-text">{escape(chart.description)}</desc>{_grid(chart.axis)}{axis_name(chart.along)}'
        f'<svg viewBox="0 0 {_PLACES} {_PLACES}" preserveAspectRatio="none">{areas}</svg>{marks}</svg></div>'
        f'<script type="application/json">{_read_out(chart, edges)}</script></figure>'
    )


def _stacked(shares: Sequence[Sequence[float]], part: int) -> list[tuple[float, float]]:
    """Return the lower and upper end of an area in each segment; the first part is the lowest."""
    return [(sum(found[:part]), sum(found[: part + 1])) for found in shares]


def _area(edges: Sequence[float], ends: Sequence[tuple[float, float]]) -> str:
    spans = list(pairwise(edges))
    upper = [point for (a, b), (_, high) in zip(spans, ends, strict=True) for point in ((a, high), (b, high))]
    lower = [point for (a, b), (low, _) in zip(spans, ends, strict=True) for point in ((a, low), (b, low))]
    around = (f"{_PLACES * x:.1f} {_PLACES * (1 - y):.1f}" for x, y in (*upper, *reversed(lower)))
    return f"M{'L'.join(around)}Z"


def _grid(axis: Axis) -> str:
    across = "".join(
        f'<text class="y" x="-8" y="{100 - percent}%" dy=".32em">{percent}%</text>'
        for percent in (0, 25, 50, 75, 100)
    )
    along = "".join(
        f'<text class="{"x edge" if axis.place(value) > _EDGE else "x"}" x="{axis.place(value):.2%}" '
        f'y="100%" dy="18">{label}</text>'
        for value, label in axis.ticks()
    )
    return f'{across}{along}<line class="axis" x2="100%" y1="100%" y2="100%"/>'


def _mark(place: float, text: str) -> str:
    x = f"{place:.2%}"
    return f'<line class="mark quiet" x1="{x}" x2="{x}" y1="0" y2="100%"><title>{escape(text)}</title></line>'


def _read_out(chart: Areas, edges: Sequence[float]) -> str:
    at, steps = [round(edge, 4) for edge in edges[1:]], [f"{step:,}" for step in chart.steps]
    data = [
        {
            "name": name,
            "style": "area",
            "at": at,
            "steps": steps,
            "values": [short(found[part], unit="share") for found in chart.shares],
        }
        for part, name in enumerate(chart.names)
    ]
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


_MOST_CORPORA = 7
"""Number of the largest corpora drawn by name; the others are one area."""
_OTHERS = "others"
_MOST_MARKS = 100


def mixture_chart(history: History, *, key: str = "mixture", title: str = "Mixture, share of tokens") -> str:
    """Return the chart as an HTML `figure` element; "" if there is only one corpus."""
    points = (MixturePoint(0, 0, {}), *history.mixture)
    if len(history.corpus_tokens) < 2 or points[-1].tokens <= 0:
        return ""
    names = _names(history)
    return draw_areas(
        Areas(
            key=key,
            title=title,
            description=_described(history, names),
            names=names,
            axis=Axis(low=0, high=float(points[-1].tokens)),
            along="tokens",
            ends=[point.tokens for point in points],
            steps=[point.step for point in points[1:]],
            shares=[_shares(early, late, names) for early, late in pairwise(points)],
            marks=[
                (change.tokens, f"{change.reason} from step {change.step:,}")
                for change in _thinned(history.mixture_changes)
            ],
        )
    )


def _names(history: History) -> list[str]:
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


def _thinned(changes: Sequence[MixtureChange]) -> Sequence[MixtureChange]:
    """Return as many marks as a chart has room for: a mixing policy makes hundreds."""
    return changes[:: -(-len(changes) // _MOST_MARKS) or 1]


def _described(history: History, names: Sequence[str]) -> str:
    total = max(sum(history.corpus_tokens.values()), 1)
    parts = [
        f"{name} {short(history.corpus_tokens[name] / total, unit='share')}"
        for name in names
        if name in history.corpus_tokens
    ]
    changes = plural(len(history.mixture_changes), "time")
    return f"Of all tokens: {', '.join(parts)}. The mixture changed {changes}."


_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "blocked on communication",
    "data_wait": "waiting for data",
}
"""Phase -> its label; useful work is at the bottom."""
_MOST_STRETCHES = 100


def phase_chart(history: History) -> str:
    """Return the chart as an HTML `figure` element; "" if no phase was recorded."""
    columns = np.stack([history.columns[f"{phase}_share"] for phase in _NAMES], axis=1)
    known = np.isfinite(columns).all(axis=1)
    steps, columns = history.steps[known], columns[known]
    if not len(steps):
        return ""
    edges = np.unique(np.linspace(0, len(steps), min(len(steps), _MOST_STRETCHES) + 1).astype(np.int64))
    means = [columns[low:high].mean(axis=0).tolist() for low, high in pairwise(edges)]
    lasts = [int(steps[high - 1]) for high in edges[1:]]
    first = float(steps[0]) - 1
    whole = ", ".join(
        f"{name} {short(float(share), unit='share')}"
        for name, share in zip(_NAMES.values(), columns.mean(axis=0), strict=True)
    )
    return draw_areas(
        Areas(
            key="phases",
            title="Where a step's time goes",
            description=f"On average: {whole}; the rest is in none of them.",
            names=list(_NAMES.values()),
            axis=Axis(low=first, high=float(lasts[-1])),
            ends=[first, *map(float, lasts)],
            steps=lasts,
            shares=means,
        )
    )

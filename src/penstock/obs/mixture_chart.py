"""Draw which corpora a run trained on: shares stacked over tokens, changes of the mixture marked.

Each stretch between two kept records has the exact share of its tokens, so the areas are what was served,
not what was asked for.
"""

import json
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from penstock.core.units import plural
from penstock.obs.axis import Axis, short
from penstock.obs.history import History, MixtureChange, MixturePoint

_MOST_CORPORA = 7
"""Drawn by name, the largest; what is left is one area."""
_OTHERS = "others"
_MOST_MARKS = 100
_PLACES = 1000


def mixture_chart(history: History) -> str:
    """Return the chart as an HTML `figure` element; nothing where there was one corpus only."""
    points = (MixturePoint(0, 0, {}), *history.mixture)
    if len(history.corpus_tokens) < 2 or points[-1].tokens <= 0:
        return ""
    names = _names(history)
    tokens = Axis(low=0, high=float(points[-1].tokens))
    shares = [_shares(early, late, names) for early, late in pairwise(points)]
    edges = [tokens.place(point.tokens) for point in points]
    areas = "".join(
        f'<path class="area a{index}" d="{_area(edges, _stacked(shares, index))}"/>'
        for index in range(len(names))
    )
    legend = "".join(f'<li><i class="area a{i}"></i>{escape(name)}</li>' for i, name in enumerate(names))
    marks = "".join(_mark(change, tokens) for change in _thinned(history.mixture_changes))
    return (
        '<figure class="chart" id="mixture"><figcaption><h3>Mixture, share of tokens</h3>'
        f'<ul class="legend">{legend}</ul></figcaption>'
        '<div class="plot" tabindex="0" style="padding-top:8px">'
        '<svg role="img" aria-labelledby="mixture-title mixture-text">'
        '<title id="mixture-title">Mixture over tokens</title>'
        f'<desc id="mixture-text">{escape(_described(history, names))}</desc>{_grid(tokens)}'
        f'<svg viewBox="0 0 {_PLACES} {_PLACES}" preserveAspectRatio="none">{areas}</svg>{marks}</svg></div>'
        f'<script type="application/json">{_read_out(points, shares, names, edges)}</script></figure>'
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


def _stacked(shares: Sequence[Sequence[float]], index: int) -> list[tuple[float, float]]:
    """Return the lower and the upper end of an area in each stretch; the largest corpus lies lowest."""
    return [(sum(found[:index]), sum(found[: index + 1])) for found in shares]


def _area(edges: Sequence[float], ends: Sequence[tuple[float, float]]) -> str:
    spans = list(pairwise(edges))
    upper = [point for (a, b), (_, high) in zip(spans, ends, strict=True) for point in ((a, high), (b, high))]
    lower = [point for (a, b), (low, _) in zip(spans, ends, strict=True) for point in ((a, low), (b, low))]
    around = (f"{_PLACES * x:.1f} {_PLACES * (1 - y):.1f}" for x, y in (*upper, *reversed(lower)))
    return f"M{'L'.join(around)}Z"


def _grid(tokens: Axis) -> str:
    across = "".join(
        f'<text class="y" x="-8" y="{100 - percent}%" dy=".32em">{percent}%</text>'
        for percent in (0, 25, 50, 75, 100)
    )
    along = "".join(
        f'<text class="{"x edge" if tokens.place(value) > 0.98 else "x"}" x="{tokens.place(value):.2%}" '
        f'y="100%" dy="18">{label}</text>'
        for value, label in tokens.ticks()
    )
    return f'{across}{along}<line class="axis" x2="100%" y1="100%" y2="100%"/>'


def _thinned(changes: Sequence[MixtureChange]) -> Sequence[MixtureChange]:
    """Leave out marks that a chart has no room for: those of a policy come in hundreds."""
    return changes[:: -(-len(changes) // _MOST_MARKS) or 1]


def _mark(change: MixtureChange, tokens: Axis) -> str:
    x = f"{tokens.place(change.tokens):.2%}"
    tip = f"<title>{escape(change.reason)} from step {change.step:,}</title>"
    return f'<line class="mark quiet" x1="{x}" x2="{x}" y1="0" y2="100%">{tip}</line>'


def _described(history: History, names: Sequence[str]) -> str:
    total = max(sum(history.corpus_tokens.values()), 1)
    parts = [
        f"{name} {short(history.corpus_tokens[name] / total, unit='share')}"
        for name in names
        if name in history.corpus_tokens
    ]
    changes = plural(len(history.mixture_changes), "time")
    return f"Of all tokens: {', '.join(parts)}. The mixture changed {changes}."


def _read_out(
    points: Sequence[MixturePoint],
    shares: Sequence[Sequence[float]],
    names: Sequence[str],
    edges: Sequence[float],
) -> str:
    at, steps = [round(edge, 4) for edge in edges[1:]], [f"{point.step:,}" for point in points[1:]]
    data = [
        {
            "name": name,
            "style": "area",
            "at": at,
            "steps": steps,
            "values": [short(found[index], unit="share") for found in shares],
        }
        for index, name in enumerate(names)
    ]
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

"""Draw shares that make up a whole as stacked areas: stretch by stretch, each as wide as it was long."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from penstock.obs.axis import Axis, short

_PLACES = 1000
_EDGE = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Areas:
    """What to draw."""

    key: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    description: str
    """For those who cannot see it."""
    names: Sequence[str]
    """Of the parts, the lowest first."""
    axis: Axis
    ends: Sequence[float]
    """[stretches + 1] where stretches begin and end on the axis."""
    steps: Sequence[int]
    """[stretches] the last step of each."""
    shares: Sequence[Sequence[float]]
    """[stretches][parts], at most 1 in sum."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines: where on the axis, and what is said of it."""


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
        f'<desc id="{key}-text">{escape(chart.description)}</desc>{_grid(chart.axis)}'
        f'<svg viewBox="0 0 {_PLACES} {_PLACES}" preserveAspectRatio="none">{areas}</svg>{marks}</svg></div>'
        f'<script type="application/json">{_read_out(chart, edges)}</script></figure>'
    )


def _stacked(shares: Sequence[Sequence[float]], part: int) -> list[tuple[float, float]]:
    """Return the lower and the upper end of an area in each stretch; the first part lies lowest."""
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

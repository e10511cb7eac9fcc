"""Chart as an HTML figure: inline SVG that fits any width, a legend, and data for the read-out.

The SVG element is the plot area. Lines are in a nested coordinate system of 1,000 x 1,000 that stretches;
text, marks and dots are placed in percent, so they keep their size on a phone. For zooming, smoothing and log
axes the page's script redraws the chart from the embedded numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

from penstock.obs.report.axis import Axis, Scale, Unit, axis_for, short
from penstock.obs.report.history import Float64
from penstock.obs.report.series import Series

_LABEL_ROWS, _ROW_PX = 4, 17
_NARROW_PX, _CHARACTER_PX = 440, 6.2
"""Plot width in pixels assumed for the spacing of labels; on a phone the style sheet shortens them."""
_FEW_DOTS, _EDGE = 50, 0.98
_LARGEST_INTEGER = 1e9  # written without a decimal point, which saves space on a page of many numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Series of a chart with its style."""

    name: str
    series: Series
    style: Literal["raw", "smooth", "dots"]
    """raw: thin line, and a band from minimum to maximum of buckets; dots: joined by a line."""
    color: int | None = None
    """Index of one of the eight colours that distinguish series of a kind; None: the style's colour."""

    @property
    def classes(self) -> str:
        """CSS classes of the layer."""
        return self.style if self.color is None else f"{self.style} c{self.color}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Vertical line at a step."""

    step: int
    text: str
    """Event at that step."""
    is_labelled: bool
    """True if written above the plot; False: only a tooltip."""

    @property
    def where(self) -> str:
        """Second half of its label."""
        return f" at step {self.step:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Data of a line chart, by step or by another quantity that grows with the steps."""

    key: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    description: str
    """Alternative text: one or two sentences that say what it shows."""
    layers: Sequence[Layer]
    last_step: float
    first_step: float = 0.0
    """Left end of the chart, equal for all charts of a run."""
    marks: Sequence[Mark] = ()
    levels: Sequence[tuple[str, float]] = ()
    """Horizontal reference lines: name and value."""
    from_zero: bool = False
    scale: Scale = "linear"
    unit: Unit = "number"
    along: str = "step"
    """Quantity on the horizontal axis."""


def draw(chart: Chart) -> str:
    """Return the chart as an HTML `figure` element."""
    steps = axis_for_steps(chart.first_step, chart.last_step)
    values = _value_axis(chart)
    label_rows = rows_of_labels(chart.marks, steps)
    top = _ROW_PX * (1 + max(label_rows.values(), default=-1))
    body = "".join(
        (
            _grid(steps, values),
            axis_name(chart.along),
            *(_mark(mark, steps, label_rows.get(mark)) for mark in chart.marks),
            f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none">{_lines(chart, steps, values)}</svg>',
            *(_level(name, value, values) for name, value in chart.levels),
            *(_dots(layer, steps, values) for layer in chart.layers if layer.style == "dots"),
        )
    )
    key, title = escape(chart.key), escape(chart.title)
    return (
        f'<figure class="chart" id="{key}" data-along="{escape(chart.along)}" data-x="{_ends(steps)}" '
        f'data-y="{_ends(values)}" data-scale="{chart.scale}" data-unit="{chart.unit}" '
        f'data-zero="{int(chart.from_zero)}">'
        f"<figcaption><h3>{title}</h3>{_legend(chart)}</figcaption>"
        f'<div class="plot" tabindex="0" style="padding-top:{top + 8}px">'
        f'<svg role="img" aria-labelledby="{key}-title {key}-text">'
        f'<title id="{key}-title">{title}</title><desc id="{key}-text">{escape(chart.description)}</desc>'
        f"{body}</svg></div>"
        f'<script type="application/json">{read_out(chart, steps)}</script></figure>'
    )


def axis_name(name: str) -> str:
    """Return the title of a horizontal axis."""
    return f'<text class="x name" x="50%" y="100%" dy="35">{escape(name)}</text>'


def _ends(axis: Axis) -> str:
    return f"{axis.low:.10g} {axis.high:.10g}"


def axis_for_steps(first: float, last: float) -> Axis:
    """Return the horizontal axis, exactly as long as the run."""
    return Axis(low=first, high=last if last > first else first + 1)


def rows_of_labels(marks: Sequence[Mark], steps: Axis) -> dict[Mark, int]:
    """Return the row above the plot, counted from the plot, for each label that fits; later marks first."""
    taken: list[list[tuple[float, float]]] = [[] for _ in range(_LABEL_ROWS)]
    rows: dict[Mark, int] = {}
    for mark in reversed([mark for mark in marks if mark.is_labelled]):
        place, width = steps.place(mark.step) * _NARROW_PX, _width(mark)
        left, right = (place - width, place) if _is_right(mark, steps) else (place, place + width)
        for number, row in enumerate(taken):
            if all(right < other_left or left > other_right for other_left, other_right in row):
                row.append((left, right))
                rows[mark] = number
                break
    return rows


def read_out(chart: Chart, steps: Axis) -> str:
    """Return the data for the page's script as JSON: for each layer positions in [0, 1], steps, values."""
    data = [
        {
            "name": layer.name,
            "style": layer.style,
            "at": [round(steps.place(step), 4) for step in layer.series.steps.tolist()],
            "steps": [_written(step) for step in layer.series.steps.tolist()],
            "classes": layer.classes,
            **_heights(layer, chart.unit),
        }
        for layer in chart.layers
        if len(layer.series.steps)
    ]
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _heights(layer: Layer, unit: Unit) -> dict[str, list[float] | list[str]]:
    """Return the heights of a layer with its band, or else the formatted values."""
    series = layer.series
    if series.is_bucketed and layer.style == "raw":
        return {"y": _rounded(series.mean), "low": _rounded(series.low), "high": _rounded(series.high)}
    return {
        "y": _rounded(series.mean),
        "values": [short(value, unit=unit) for value in series.mean.tolist()],
    }


def _rounded(values: Float64) -> list[float]:
    five_digits = [float(f"{value:.5g}") for value in values.tolist()]
    return [int(v) if v.is_integer() and abs(v) < _LARGEST_INTEGER else v for v in five_digits]


def _written(place: float) -> str:
    return f"{round(place):,}" if place == round(place) or place >= 100 else short(place)


def _value_axis(chart: Chart) -> Axis:
    lows = [layer.series.low.min() for layer in chart.layers if len(layer.series.low)]
    highs = [layer.series.high.max() for layer in chart.layers if len(layer.series.high)]
    levels = [value for _, value in chart.levels]
    return axis_for(
        float(min([*lows, *levels], default=0.0)),
        float(max([*highs, *levels], default=1.0)),
        from_zero=chart.from_zero,
        scale=chart.scale,
        unit=chart.unit,
    )


def _grid(steps: Axis, values: Axis) -> str:
    across = "".join(
        f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>'
        f'<text class="y" x="-8" y="{y}" dy=".32em">{label}</text>'
        for y, label in ((_y(values.place(value)), label) for value, label in values.ticks())
    )
    along = "".join(
        f'<text class="{"x edge" if steps.place(step) > _EDGE else "x"}" x="{_x(steps.place(step))}" '
        f'y="100%" dy="18">{label}</text>'
        for step, label in steps.ticks()
    )
    return f'{across}<line class="axis" x2="100%" y1="100%" y2="100%"/>{along}'


def _lines(chart: Chart, steps: Axis, values: Axis) -> str:
    drawn = []
    for layer in chart.layers:
        series = layer.series
        if not len(series.steps):
            continue
        if layer.style == "raw" and series.is_bucketed:
            around = np.concatenate((series.steps, series.steps[::-1]))
            outline = _path(around, np.concatenate((series.high, series.low[::-1])), steps, values)
            drawn.append(f'<path class="band" d="{outline}Z"/>')
        drawn.append(f'<path class="{layer.classes}" d="{_path(series.steps, series.mean, steps, values)}"/>')
    return "".join(drawn)


def _path(at: Float64, heights: Float64, steps: Axis, values: Axis) -> str:
    points = [
        f"{1000 * steps.place(step):.1f} {1000 * (1 - values.place(value)):.1f}"
        for step, value in zip(at.tolist(), heights.tolist(), strict=True)
    ]
    return f"M{'L'.join(points if len(points) > 1 else points * 2)}"  # a line of no length shows as a dot


def _dots(layer: Layer, steps: Axis, values: Axis) -> str:
    points = zip(layer.series.steps.tolist(), layer.series.mean.tolist(), strict=True)
    radius = 3.5 if len(layer.series.steps) <= _FEW_DOTS else 2
    return "".join(
        f'<circle class="dot" cx="{_x(steps.place(step))}" cy="{_y(values.place(value))}" r="{radius}"/>'
        for step, value in points
    )


def _mark(mark: Mark, steps: Axis, row: int | None) -> str:
    x, text = _x(steps.place(mark.step)), escape(mark.text)
    if row is None:
        tip = f"<title>{text}{mark.where}</title>"
        return f'<line class="mark quiet" x1="{x}" x2="{x}" y1="0" y2="100%">{tip}</line>'
    top, side = -_ROW_PX * (row + 1), ("end", -6) if _is_right(mark, steps) else ("start", 6)
    return (
        f'<line class="mark" x1="{x}" x2="{x}" y1="{top + 3}" y2="100%"/>'
        f'<text class="note" x="{x}" y="{top + 13}" dx="{side[1]}" text-anchor="{side[0]}">{text}'
        f'<tspan class="wide">{mark.where}</tspan></text>'
    )


def _level(name: str, value: float, values: Axis) -> str:
    y, text = _y(values.place(value)), f"{escape(name)} {short(value)}"
    data = f'data-value="{value:.10g}"'
    return (
        f'<line class="level" {data} x2="100%" y1="{y}" y2="{y}"/>'
        f'<text class="note" {data} x="100%" y="{y}" dy="-6" text-anchor="end">{text}</text>'
    )


def _legend(chart: Chart) -> str:
    if len(chart.layers) < 2:
        return ""
    items = "".join(
        f'<li><i class="{layer.classes}"></i>{escape(layer.name)}</li>'
        for layer in chart.layers
        if len(layer.series.steps)
    )
    return f'<ul class="legend">{items}</ul>'


def _width(mark: Mark) -> float:
    return len(mark.text + mark.where) * _CHARACTER_PX


def _is_right(mark: Mark, steps: Axis) -> bool:
    """Return True if the label has no room to the right of its line and goes to the left."""
    return steps.place(mark.step) * _NARROW_PX + _width(mark) > _NARROW_PX


def _x(place: float) -> str:
    return f"{100 * place:.2f}%"


def _y(place: float) -> str:
    return f"{100 * (1 - place):.2f}%"

"""Charts of a report as numbers for the page's script: few points, smoothed from all steps, safe as JSON.

A run of a million steps is a page of the same size as one of a thousand: each line is thinned to the points
that its shape needs. Smoothing is done here, from every step, since a mean of thinned points is not the mean:
thinning prefers extremes. So a line is embedded with its means over a few widths, and the reader chooses.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np

from penstock.core.units import Unit
from penstock.obs.thin import Float64, largest_triangles

Style = Literal["line", "dots", "area"]
ChartUnit = Unit | Literal["s"]

_POINTS = 600
"""Points of a line, about one per two pixels of the widest chart."""
_MEAN_POINTS = 200
_SHARES = (200, 50, 12)
"""A mean is over one in so many of the steps."""
_FEWEST = 5
"""Steps of the narrowest mean."""
SMOOTHING = ("off", "0.5% of the steps", "2% of the steps", "8% of the steps")
"""What the reader chooses from."""
_CHOSEN = 2
_LARGEST_INTEGER = 1e9  # written without a decimal point, which saves space on a page of many numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Series of a chart with its style; thinned, values that are not finite left out."""

    name: str
    x: Float64
    """[points] ascending."""
    y: Float64
    """[points]"""
    style: Style = "line"
    color: int | str = 0
    """One of eight colours, or the name of a CSS property."""
    means: Sequence[tuple[str, Float64, Float64]] = ()
    """Name, x and y of the mean for each choice of SMOOTHING but the first; (): never smoothed."""
    stays: bool = False
    """True if the line stays, faint, behind its mean."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Vertical line at a place of the horizontal axis."""

    at: float
    text: str
    """Event there."""
    is_labelled: bool = False
    """True if written above the plot; False: only where the reader points at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Data of one chart."""

    key: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    description: str
    """One or two sentences that say what it shows, for a page without scripts."""
    layers: Sequence[Layer]
    along: str = "step"
    """Quantity on the horizontal axis: "step", "tokens" or "time", in seconds."""
    marks: Sequence[Mark] = ()
    levels: Sequence[tuple[str, float]] = ()
    """Horizontal reference lines: name and value."""
    from_zero: bool = False
    is_log: bool = False
    is_wide: bool = False
    is_stepped: bool = False
    """True if a value holds from the point before it on, as a share of what lies between two records does."""
    unit: ChartUnit = "number"

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the options of the script's Chart."""
        return {
            "id": self.key,
            "title": self.title,
            "along": self.along,
            "unit": "" if self.unit == "number" else self.unit,
            "fromZero": self.from_zero,
            "log": self.is_log,
            "isWide": self.is_wide,
            "isStepped": self.is_stepped,
            "marks": [
                {"x": mark.at, "text": mark.text, "isLabelled": mark.is_labelled} for mark in self.marks
            ],
            "levels": [[name, value] for name, value in self.levels],
            "layers": [_layer(layer) for layer in self.layers if len(layer.x)],
        }


def charts_section(charts: Iterable[Chart], *, label: str) -> str:
    """Return the section of charts as HTML: their numbers for the script, and words for a page without it."""
    drawn = [chart for chart in charts if any(len(layer.x) for layer in chart.layers)]
    if not drawn:
        return ""
    data = {"smoothing": SMOOTHING, "chosen": _CHOSEN, "charts": [chart.as_json() for chart in drawn]}
    words = "".join(f"<li>{escape(chart.description)}</li>" for chart in drawn)
    return (
        f'<section class="charts" id="charts" aria-label="{escape(label)}"><h2 class="unseen">Charts</h2>'
        '<div class="wide" id="in-words"><p>The charts are drawn by the script of this page, which does not '
        f"run here. In words:</p><ul>{words}</ul></div></section>"
        f'<script type="application/json" id="chart-data">{embedded(data)}</script>'
    )


def embedded(value: Any) -> str:  # Any: JSON
    """Return JSON that no text in it can end the script element of.

    >>> embedded({"a": "</script>"})
    '{"a":"\\\\u003c/script>"}'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def line(
    x: Float64,
    y: Float64,
    *,
    name: str,
    color: int | str,
    stays: bool = True,
    is_smoothed: bool = True,
    breaks: Sequence[int] = (),
    points: int = _POINTS,
    mean_points: int = _MEAN_POINTS,
) -> Layer:
    """Return a line with its means.

    Args:
        x: [n] ascending.
        y: [n] values; NaN where there is none.
        stays: True if the line stays behind its mean, which is then named after its width.
        breaks: ascending positions that no mean crosses.
        points: of the line.
        mean_points: of each mean.
    """
    means = []
    if is_smoothed and len(y) >= 2 * window_for(len(y)):
        for share in _SHARES:
            window = window_for(len(y), share=share)
            mean = smooth(y, window=window, breaks=breaks)
            title = f"mean of {window:,} steps" if stays else name
            means.append((title, *thinned(x, mean, points=mean_points)))
    at, values = thinned(x, y, points=points)
    return Layer(name=name, x=at, y=values, color=color, means=means, stays=stays)


def dots(x: Float64, y: Float64, *, name: str, color: int | str, points: int = _MEAN_POINTS) -> Layer:
    """Return single points, such as validations."""
    at, values = thinned(x, y, points=points)
    return Layer(name=name, x=at, y=values, style="dots", color=color)


def thinned(x: Float64, y: Float64, *, points: int) -> tuple[Float64, Float64]:
    """Return at most so many of the points that are finite: those that keep the shape."""
    kept = largest_triangles(x, np.where(np.isfinite(x), y, np.nan), points)
    return x[kept], y[kept]


def smooth(values: Float64, *, window: int, breaks: Sequence[int] = ()) -> Float64:
    """Return the centred moving average of width `window`, narrower at the ends.

    Centred, so that it does not lag like an exponential average; values that are not finite are ignored.

    Args:
        breaks: ascending positions that no window crosses.

    >>> smooth(np.array([0.0, 3.0, 6.0, 0.0]), window=3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    if breaks:
        return np.concatenate([smooth(part, window=window) for part in np.split(values, breaks)])
    half = window // 2
    finite = np.isfinite(values)
    totals = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    places = np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    number = counts[last] - counts[first]
    mean: Float64 = np.where(number > 0, (totals[last] - totals[first]) / np.maximum(number, 1), np.nan)
    return mean


def window_for(num_values: int, *, share: int = 50) -> int:
    """Return the smoothing window: one in `share` of the values, odd, at least 5.

    >>> window_for(60), window_for(10_000)
    (5, 201)
    """
    return max(_FEWEST, num_values // share | 1)


def _layer(layer: Layer) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": layer.name,
        "style": layer.style,
        "color": layer.color,
        **_points(layer.x, layer.y),
    }
    if layer.means:
        found["means"] = [{"name": name, **_points(x, y)} for name, x, y in layer.means]
        found["stays"] = layer.stays
    return found


def _points(x: Float64, y: Float64) -> dict[str, list[float]]:
    return {
        "x": [_rounded(value, digits=9) for value in x.tolist()],
        "y": [_rounded(value) for value in y.tolist()],
    }


def _rounded(value: float, *, digits: int = 5) -> float:
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < _LARGEST_INTEGER else value

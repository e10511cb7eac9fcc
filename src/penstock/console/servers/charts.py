"""Charts of servers: what their page draws, and the file to take along with what was drawn so far."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

import numpy as np

from penstock.console.servers.history import POINT_FIELDS, Point, ServerHistory
from penstock.core import clock
from penstock.core.units import duration, short
from penstock.obs.report.charts import Chart, ChartUnit, Layer, charts_section, line
from penstock.obs.report.html import page, section
from penstock.obs.report.summary import UNKNOWN


@dataclass(frozen=True, slots=True)
class ServerChart:
    """Chart of a server's points over time; its values begin at zero."""

    key: str
    title: str
    lines: tuple[tuple[str, str, int], ...]
    """Field of a point, label and colour of each line."""
    unit: ChartUnit = "number"

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return what the page makes a chart of."""
        unit = "" if self.unit == "number" else self.unit
        return {"id": self.key, "title": self.title, "unit": unit, "fromZero": True, "of": self.lines}


CHARTS = (
    ServerChart(
        "queue", "Answers running and waiting", (("running", "running", 0), ("waiting", "waiting", 1))
    ),
    ServerChart(
        "rate",
        "Tokens per second",
        (("answer_tokens_per_s", "of answers", 0), ("computed_tokens_per_s", "computed, prompts too", 2)),
    ),
    ServerChart(
        "first",
        "Time to the first token",
        (("first_p50", "half of them within", 0), ("first_p99", "99% within", 1)),
        "s",
    ),
    ServerChart(
        "between",
        "Time between tokens",
        (("between_p50", "half of them within", 0), ("between_p99", "99% within", 1)),
        "s",
    ),
    ServerChart("cache", "KV cache in use", (("cache", "blocks held", 4),), "share"),
    ServerChart("drafts", "Drafts accepted", (("accepted", "of those guessed", 5),), "share"),
)
"""Charts of each server, in their order."""


def render_servers(servers: Sequence[ServerHistory]) -> str:
    """Return a page with the charts of all points so far; of servers it has the names, not the addresses."""
    named = [(one.server.name, one.known()) for one in servers]
    charts = [
        _drawn(
            chart, points, key=f"{chart.key}-{number}", title=_titled(chart, name, is_alone=len(named) == 1)
        )
        for number, (name, points) in enumerate(named)
        for chart in CHARTS
        if points
    ]
    rows = [[name, f"{len(points):,}", *_range(points)] for name, points in named]
    parts = (
        f'<header><p class="eyebrow">Penstock servers</p><h1>{escape(" · ".join(name for name, _ in named))}'
        "</h1></header>",
        charts_section(charts, label="Charts by time"),
        section("Readings", ["server", "readings", "first, UTC", "last, UTC"], rows),
        "<footer>Drawn by <code>penstock console</code> from the servers' /metrics.</footer>",
    )
    return page("Penstock servers", parts)


def rows_of(servers: Sequence[ServerHistory]) -> Iterator[dict[str, float | str | None]]:
    """Yield all points so far, with the server's name; `time` is in seconds since 1970."""
    for one in servers:
        for point in one.known():
            yield {**point, "server": one.server.name, "time": _unix(point)}


def _titled(chart: ServerChart, name: str, *, is_alone: bool) -> str:
    return chart.title if is_alone else f"{name}: {chart.title}"


def _drawn(chart: ServerChart, points: Sequence[Point], *, key: str, title: str) -> Chart:
    columns = {
        field: np.array([np.nan if (value := point.get(field)) is None else value for point in points])
        for field in POINT_FIELDS
    }
    layers = [
        line(columns["time"] - columns["time"][0], columns[field], name=name, color=color, is_smoothed=False)
        for field, name, color in chart.lines
    ]
    said = ", ".join(f"{layer.name} {_ends(layer, chart)}" for layer in layers if len(layer.x))
    return Chart(
        key=key,
        title=title,
        description=f"{title}: {said}.",
        layers=layers,
        along="time",
        from_zero=True,
        unit=chart.unit,
    )


def _ends(layer: Layer, chart: ServerChart) -> str:
    first, last = (
        duration(float(value)) if chart.unit == "s" else short(float(value), unit=chart.unit)
        for value in (layer.y[0], layer.y[-1])
    )
    return f"from {first} to {last}"


def _range(points: Sequence[Point]) -> list[str]:
    """Return the times of the first and the last point as text."""
    ends = [datetime.fromtimestamp(_unix(point), UTC) for point in (*points[:1], *points[-1:])]
    return [f"{at:%Y-%m-%d %H:%M:%S}" for at in ends] or [UNKNOWN, UNKNOWN]


def _unix(point: Point) -> float:
    return (point["time"] or 0.0) + clock.unix_seconds() - clock.monotonic()

"""Draw results as SVG files that stand alone: lines over a number, bars over names.

Colours are of one palette that tells apart for most eyes (Okabe and Ito, 2008), on white.
"""

from dataclasses import dataclass
from html import escape

from axis import Axis, axis_for

from penstock.core.units import short

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 44, 46
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#000000")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
_LEGEND_ROW_PX, _BAR_ROW_PX, _CHARACTER_PX, _EDGE = 16, 22, 7.0, 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    """With `high`: a band behind the line."""
    high: list[float] | None = None


def lines(title, series, *, x_label, y_label, log_x=False, log_y=False, from_zero=False):
    """Return a line chart as SVG text."""
    xs = [x for line in series for x in line.x]
    ys = [y for line in series for y in [*line.y, *(line.low or ()), *(line.high or ())]]
    across = axis_for(min(xs), max(xs), scale="log") if log_x else Axis(low=min(xs), high=_past(xs))
    up = axis_for(min(ys), max(ys), from_zero=from_zero, scale="log" if log_y else "linear")
    top = TOP + _LEGEND_ROW_PX * len(series)
    height = HEIGHT + _LEGEND_ROW_PX * len(series)

    def at(x, y):
        left = LEFT + across.place(x) * (WIDTH - LEFT - RIGHT)
        return f"{left:.1f},{height - BOTTOM - up.place(y) * (height - BOTTOM - top):.1f}"

    parts = [_grid(across, up, top=top, height=height), _labels(x_label, y_label, top=top, height=height)]
    for number, line in enumerate(series):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        if line.low is not None and line.high is not None:
            edge = [at(x, y) for x, y in zip(line.x, line.low, strict=True)]
            edge += [at(x, y) for x, y in zip(line.x[::-1], line.high[::-1], strict=True)]
            parts.append(f'<polygon points="{" ".join(edge)}" fill="{colour}" opacity=".15"/>')
        points = " ".join(at(x, y) for x, y in zip(line.x, line.y, strict=True))
        stroke = f'stroke="{colour}" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{points}" fill="none" stroke-width="1.8" {stroke}/>')
        y = TOP + _LEGEND_ROW_PX * number
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{y - 4}" y2="{y - 4}" stroke-width="3" {stroke}/>'
        )
        parts.append(f'<text x="{LEFT + 30}" y="{y}">{escape(line.name)}</text>')
    return _page(title, "".join(parts), height=height)


def bars(title, rows, *, x_label, log=False):
    """Return a chart of horizontal bars as SVG text.

    Args:
        rows: (name, value, colour number), from the top.
    """
    left = 20 + _CHARACTER_PX * max(len(name) for name, _, _ in rows)
    height = TOP + _BAR_ROW_PX * len(rows) + BOTTOM
    values = [value for _, value, _ in rows if value > 0] or [1.0]
    across = (
        axis_for(min(values), max(values), scale="log") if log else axis_for(0, max(values), from_zero=True)
    )
    room = WIDTH - left - RIGHT - 50
    parts = []
    for value, label in across.ticks():
        x = left + across.place(value) * room
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{label}</text>'
        )
    for number, (name, value, colour) in enumerate(rows):
        y = TOP + _BAR_ROW_PX * number
        wide = across.place(value) * room if value > 0 else 0
        fill = COLOURS[colour % len(COLOURS)]
        parts.append(f'<text x="{left - 8:.1f}" y="{y + 11}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{left:.1f}" y="{y}" width="{wide:.1f}" height="14" fill="{fill}"/>')
        parts.append(f'<text x="{left + wide + 6:.1f}" y="{y + 11}">{short(value)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 10}" text-anchor="end">{escape(x_label)}</text>')
    return _page(title, "".join(parts), height=height)


def _past(values):
    return max(values) if max(values) > min(values) else min(values) + 1


def _grid(across, up, *, top, height):
    parts = []
    for value, label in up.ticks():
        y = height - BOTTOM - up.place(value) * (height - BOTTOM - top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in across.ticks():
        x = LEFT + across.place(value) * (WIDTH - LEFT - RIGHT)
        anchor = "end" if across.place(value) > _EDGE else "middle"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - BOTTOM + 18}" text-anchor="{anchor}">{label}</text>'
        )
    return "".join(parts)


def _labels(x_label, y_label, *, top, height):
    middle = (top + height - BOTTOM) / 2
    return (
        f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">{escape(x_label)}</text>'
        f'<text transform="translate(14,{middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )


def _page(title, body, *, height):
    style = (
        "text{font:12px system-ui,sans-serif;fill:#222}.tick{fill:#666}.grid{stroke:#ddd}"
        ".title{font-size:15px;font-weight:600}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f'<title>{escape(title)}</title><style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="title" x="16" y="22">{escape(title)}</text>{body}</svg>\n'
    )

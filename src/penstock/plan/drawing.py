"""Draw a step's timeline: an SVG that stands alone, and a trace that ui.perfetto.dev opens; pure.

Three lanes, one a stream, in the colours of the run report: what computes, what is gathered, what is
reduced. Where the lane of computing is empty, the device waits. The drawing shows the first micro-batch and
the last, at most three; the others are like the middle one.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from penstock.obs.axis import Axis, short
from penstock.plan.timeline import Event, Stream

_WIDTH, _LEFT, _RIGHT, _TOP = 960, 78, 14, 46
_LANE, _GAP, _BOTTOM = 44, 12, 40
_LANES: tuple[Stream, ...] = ("compute", "gather", "reduce")
_COLOURS = {"none": "#0072b2", "node": "#009e73", "network": "#d55e00"}  # Okabe and Ito, 2008
_MEANING = {"none": "computing", "node": "links in the node", "network": "the network"}
_MICROSECONDS = 1e6


def svg(events: Sequence[Event], *, title: str) -> str:
    """Return the timeline as SVG text."""
    end = max((event.start_s + event.seconds for event in events), default=1.0)
    across = Axis(low=0.0, high=end)
    height = _TOP + len(_LANES) * (_LANE + _GAP) + _BOTTOM
    bars = "".join(_bar(event, across) for event in events)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>'
        f"{_legend()}{_lanes()}{bars}{_seconds(across, height - _BOTTOM)}</svg>\n"
    )


def trace(events: Sequence[Event]) -> dict[str, Any]:
    """Return the timeline in the Trace Event Format: complete events, times in microseconds."""
    named = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": stream}}
        for lane, stream in enumerate(_LANES)
    ]
    slices = [
        {
            "name": event.name,
            "cat": event.stream,
            "ph": "X",
            "pid": 0,
            "tid": _LANES.index(event.stream),
            "ts": event.start_s * _MICROSECONDS,
            "dur": event.seconds * _MICROSECONDS,
            "args": {"link": event.link, "micro_batch": event.micro_batch},
        }
        for event in events
    ]
    return {"traceEvents": [*named, *slices], "displayTimeUnit": "ms"}


def _x(across: Axis, seconds: float) -> float:
    return _LEFT + across.place(seconds) * (_WIDTH - _LEFT - _RIGHT)


def _y(stream: Stream) -> int:
    return _TOP + _LANES.index(stream) * (_LANE + _GAP)


def _bar(event: Event, across: Axis) -> str:
    left, right = _x(across, event.start_s), _x(across, event.start_s + event.seconds)
    tip = f"{event.name}, micro-batch {event.micro_batch}: {1000 * event.seconds:.2f} ms"
    return (
        f'<rect x="{left:.2f}" y="{_y(event.stream)}" width="{max(0.3, right - left):.2f}" height="{_LANE}" '
        f'fill="{_COLOURS[event.link]}" stroke="#fff" stroke-width=".4"><title>{escape(tip)}</title></rect>'
    )


def _lanes() -> str:
    return "".join(
        f'<text x="{_LEFT - 8}" y="{_y(stream) + _LANE / 2 + 4}" text-anchor="end">{stream}</text>'
        for stream in _LANES
    )


def _legend() -> str:
    items = []
    for number, (link, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 150 * number
        items.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>')
        items.append(f'<text x="{x + 15}" y="37">{_MEANING[link]}</text>')
    return "".join(items)


def _seconds(across: Axis, y: float) -> str:
    ticks = "".join(
        f'<text x="{_x(across, at):.1f}" y="{y + 16}" text-anchor="middle">{label}</text>'
        f'<line x1="{_x(across, at):.1f}" x2="{_x(across, at):.1f}" y1="{y - 4}" y2="{y}" stroke="#888"/>'
        for at, label in across.ticks()
    )
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#888"/>{ticks}'
        f'<text x="{_WIDTH - _RIGHT}" y="{y + 32}" text-anchor="end">seconds, of {short(across.high)}</text>'
    )

"""Axes of a picture: positions of values, ticks and their labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Scale = Literal["linear", "log"]

_TICKS = 5
_LARGEST = 1e15
"""Numbers from here on are written with an exponent."""
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Value range of one side of a chart; low < high, and low > 0 on a log scale."""

    low: float
    high: float
    scale: Scale = "linear"

    def place(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end, clipped to [0, 1].

        >>> Axis(low=1, high=100, scale="log").place(10)
        0.5
        """
        low, high = self.low, self.high
        if self.scale == "log":
            value, low, high = (math.log10(v) for v in (max(value, low), low, high))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return about five round values in the range, and their labels."""
        if self.scale == "log":
            found = self._decades()
            if len(found) > 1:
                return [(value, f"{value:g}") for value in found]
        found = self._round_values()
        return list(zip(found, tick_labels(found), strict=True))

    def _round_values(self) -> list[float]:
        gap = round_step(self.high - self.low, number=_TICKS)
        first, last = math.ceil(self.low / gap - 1e-9), math.floor(self.high / gap + 1e-9)
        return [place * gap for place in range(first, last + 1)]

    def _decades(self) -> list[float]:
        low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in ((1, 2, 5), (1, 3), (1,)):
            every = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
            found = [value for value in every if self.low <= value <= self.high]
            if len(found) <= _TICKS + 2:
                return found
        return found[:: math.ceil(len(found) / _TICKS)]


def axis_for(low: float, high: float, *, from_zero: bool = False, scale: Scale = "linear") -> Axis:
    """Return an axis that shows all of [low, high] with a small margin.

    >>> axis_for(0.2, 0.92, from_zero=True)
    Axis(low=0.0, high=1.0, scale='linear')
    """
    if scale == "log":
        return Axis(low=low / 1.15, high=high * 1.15, scale="log")
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high <= low:
        low, high = (0.0, high * 2) if from_zero and high else (low - 0.5, high + 0.5)
    gap = round_step(high - low, number=_TICKS)
    room = (high - low) * 0.04
    return Axis(
        low=math.floor(low / gap) * gap if from_zero else low - room,
        high=max(high, math.ceil(high / gap - 1e-9) * gap) if from_zero else high + room,
    )


def round_step(span: float, *, number: int) -> float:
    """Return the gap between ticks, 1, 2 or 5 times a power of ten, for about `number` of them.

    >>> round_step(60, number=5), round_step(0.7, number=5)
    (10.0, 0.2)
    """
    power = 10.0 ** math.floor(math.log10(span / number))
    return next((f * power for f in (1, 2, 5) if span / (f * power) <= number + 1), 10 * power)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return labels with equal decimals, enough to distinguish the ticks.

    >>> tick_labels([0, 500, 1000]), tick_labels([0, 15_000, 30_000]), tick_labels([0, 1e-4, 2e-4])
    (['0', '500', '1,000'], ['0', '15k', '30k'], ['0', '1e-4', '2e-4'])
    """
    most = max((abs(tick) for tick in ticks), default=0.0)
    if 0 < most < 0.01 or most >= _LARGEST:
        return [_scientific(tick) for tick in ticks]
    if most < 10_000:
        return _decimals(ticks, "")
    power, letter = next(pair for pair in _UNITS if most >= pair[0])
    return [
        label if tick else "0"
        for tick, label in zip(ticks, _decimals([tick / power for tick in ticks], letter), strict=True)
    ]


def _decimals(values: Sequence[float], letter: str) -> list[str]:
    gap = min((after - before for before, after in pairwise(values)), default=1.0)
    for places in range(13):
        if all(abs(round(value, places) - value) < gap / 1000 for value in values):
            break
    return [f"{value:,.{places}f}{letter}" for value in values]


def _scientific(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"

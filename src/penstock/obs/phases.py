"""Tell where a step's time goes: the shares of its phases, from marks set as they end.

A mark costs a reading of the clock. On a GPU, whose work is only queued when the host goes on, marks are
events on its stream; they are read a step late, when they have passed for certain, so nothing waits.

Communication that computation does not hide is time inside another phase. Who blocks on it counts the
seconds; they are moved from the phase they fell in.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

from penstock.core import clock

PHASES = ("data_wait", "forward", "backward", "communication", "optimizer")
"""In the order of a step; what lies between marks of none of them is the rest."""


class Stamps(Protocol):
    """Moments on one time line."""

    is_late: bool
    """Whether moments can be compared only after the device has passed them."""

    def now(self) -> object:
        """Return this moment."""
        ...

    def seconds(self, first: object, then: object) -> float:
        """Return the time between two moments."""
        ...


class HostStamps:
    """Moments of the host's clock."""

    is_late = False

    def now(self) -> float:
        """Return this moment."""
        return clock.monotonic()

    def seconds(self, first: object, then: object) -> float:
        """Return the time between two moments."""
        assert isinstance(first, float), first
        assert isinstance(then, float), then
        return then - first


class CudaStamps:
    """Moments on the current stream of a GPU."""

    is_late = True

    def now(self) -> torch.cuda.Event:
        """Return this moment."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: object, then: object) -> float:
        """Return the time between two moments that have passed."""
        assert isinstance(first, torch.cuda.Event), first
        assert isinstance(then, torch.cuda.Event), then
        return float(first.elapsed_time(then)) / 1000


def stamps_for(device_type: str) -> Stamps:
    """Return the time line on which a device's work happens."""
    return CudaStamps() if device_type == "cuda" else HostStamps()


Mark = tuple[str, object, float]  # phase that ended, when, seconds blocked on communication until then


class Phases:
    """Shares of the phases of a step.

    Args:
        stamps: the time line.
        blocked_s: returns the seconds this process has so far blocked on communication.
    """

    def __init__(self, stamps: Stamps | None = None, blocked_s: Callable[[], float] = lambda: 0.0) -> None:
        self._stamps: Stamps = stamps or HostStamps()
        self._blocked_s = blocked_s
        self._marks: list[Mark] = []
        self._before: list[Mark] = []

    def start(self) -> None:
        """Begin a step."""
        self._before, self._marks = self._marks, [("", self._stamps.now(), self._blocked_s())]

    def mark(self, phase: str) -> None:
        """Say that the time since the last mark was spent in a phase; "" for none of them."""
        assert not phase or phase in PHASES, phase
        self._marks.append((phase, self._stamps.now(), self._blocked_s()))

    def shares(self) -> dict[str, float]:
        """Return each phase's share of the step, of the one before on a GPU; {} where nothing is known."""
        marks = self._before if self._stamps.is_late else self._marks
        if len(marks) < 2:
            return {}
        spent = dict.fromkeys(PHASES, 0.0)
        for (_, first, blocked), (phase, then, blocked_then) in pairwise(marks):
            exposed = blocked_then - blocked
            spent["communication"] += exposed
            if phase:
                spent[phase] += max(self._stamps.seconds(first, then) - exposed, 0.0)
        whole = max(self._stamps.seconds(marks[0][1], marks[-1][1]), 1e-9)
        return {phase: seconds / whole for phase, seconds in spent.items()}

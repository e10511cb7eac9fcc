"""Step meter: rates of a step from its duration and counts, and the shares of its phases.

A mark costs a reading of the clock. On a GPU, whose work is only queued by the host, marks are events on its
stream; they are read one step late, when they have certainly passed, so nothing waits.

Exposed communication is time inside another phase. The code that blocks on it counts the seconds; they are
moved out of the phase in which they fell.
"""

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from penstock.core import clock
from penstock.devices import accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one step."""

    step_s: float
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs utilisation; None if the peak is unknown."""
    hfu: float | None
    """Like mfu, with recomputed activations counted."""
    shares: dict[str, float]
    """Phase -> its share of the step's wall time."""


@dataclass(frozen=True, slots=True)
class Stamps:
    """Source of timestamps on the host or on a device."""

    now: Callable[[], Any]  # Any: the source's own
    seconds: Callable[[Any, Any], float]
    """(first, then) -> the seconds between two timestamps."""
    is_late: bool = False
    """True if timestamps can be compared only after the device has passed them."""


class Phases:
    """Shares of the phases of a step.

    Args:
        stamps: source of timestamps.
        blocked_s: returns the seconds this process has been blocked on communication so far.
    """

    def __init__(self, stamps: Stamps | None = None, blocked_s: Callable[[], float] = lambda: 0.0) -> None:
        self._stamps = stamps or stamps_for("cpu")
        self._blocked_s = blocked_s
        self._marks: list[Mark] = []
        self._before: list[Mark] = []

    def start(self) -> None:
        """Begin a step."""
        self._before, self._marks = self._marks, [("", self._stamps.now(), self._blocked_s())]

    def mark(self, phase: str) -> None:
        """Assign the time since the last mark to a phase; "" for none."""
        assert not phase or phase in PHASES, phase
        self._marks.append((phase, self._stamps.now(), self._blocked_s()))

    def shares(self) -> dict[str, float]:
        """Return each phase's share of the step (on a GPU, of the step before); {} if unknown."""
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


class StepMeter:
    """Timer of a step and its phases.

    Args:
        flops_per_token: function of the sequence length; forward and backward.
        peak_flops: peak FLOP/s of all devices of the run; None if unknown.
        recomputed_share: share of the forward pass that is recomputed in the backward pass.
        phases: phase timer.
    """

    def __init__(
        self,
        *,
        flops_per_token: Callable[[int], float],
        peak_flops: float | None,
        recomputed_share: float = 0.0,
        phases: Phases | None = None,
    ) -> None:
        self._flops = flops_per_token
        self._peak = peak_flops
        self._hardware = 1 + recomputed_share / 3  # the backward pass costs twice the forward pass
        self._phases = phases or Phases()
        self._start = clock.monotonic()

    def start(self) -> None:
        """Begin a step."""
        self._start = clock.monotonic()
        self._phases.start()

    def mark(self, phase: str) -> None:
        """Assign the time since the last mark to a phase of PHASES."""
        self._phases.mark(phase)

    def finish(self, *, rows: int, sequence_length: int) -> Rates:
        """Mark the end of the step and return its rates.

        Args:
            rows: rows of the step over all ranks.
        """
        step_s = max(clock.monotonic() - self._start, 1e-9)
        rate = rows * sequence_length / step_s
        mfu = None if self._peak is None else rate * self._flops(sequence_length) / self._peak
        hfu = None if mfu is None else mfu * self._hardware
        self._phases.mark("")
        return Rates(step_s=step_s, tokens_per_s=rate, mfu=mfu, hfu=hfu, shares=self._phases.shares())


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


PHASES = ("data_wait", "forward", "backward", "communication", "optimizer")
"""Phases in the order of a step; time in none of them is the remainder."""


def stamps_for(device_type: str) -> Stamps:
    """Return the timestamps of the host's clock, or on the current stream of an accelerator."""
    if not accelerator.is_accelerator(device_type):
        return Stamps(clock.monotonic, lambda first, then: then - first)
    event = partial(accelerator.timed_event, device_type)
    return Stamps(event, lambda first, then: float(first.elapsed_time(then)) / 1000, is_late=True)


Mark = tuple[str, object, float]  # phase that ended, when, seconds blocked on communication until then

"""Turn durations and counts of a step into rates; the only arithmetic of the metrics."""

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass

from penstock.core import clock
from penstock.obs.phases import Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one step."""

    step_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    """As mfu, with what is computed a second time to save memory."""
    shares: dict[str, float]
    """Phase -> its share of the step; see obs/phases.py."""


class StepMeter:
    """Times the parts of a step.

    Args:
        flops_per_token: of forward and backward, at a sequence length.
        peak_flops: what all devices of the run could do per second.
        recomputed_share: of the forward pass that is computed a second time.
        phases: where a step's time goes.
    """

    def __init__(
        self,
        *,
        flops_per_token: Callable[[int], float],
        peak_flops: float,
        recomputed_share: float = 0.0,
        phases: Phases | None = None,
    ) -> None:
        self._flops = flops_per_token
        self._peak = peak_flops
        self._hardware = 1 + recomputed_share / 3  # backward computes twice what forward does
        self._phases = phases or Phases()
        self._start = clock.monotonic()

    def start(self) -> None:
        """Begin a step."""
        self._start = clock.monotonic()
        self._phases.start()

    def mark(self, phase: str) -> None:
        """Say that the time since the last mark was spent in a phase of obs/phases.py."""
        self._phases.mark(phase)

    def finish(self, *, rows: int, sequence_length: int) -> Rates:
        """Mark the end of the step.

        Args:
            rows: of the step, over all ranks.
        """
        step_s = max(clock.monotonic() - self._start, 1e-9)
        rate = rows * sequence_length / step_s
        mfu = rate * self._flops(sequence_length) / self._peak
        self._phases.mark("")
        return Rates(
            step_s=step_s, tokens_per_s=rate, mfu=mfu, hfu=mfu * self._hardware, shares=self._phases.shares()
        )


def peak_memory_bytes() -> int:
    """Return the largest resident memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB

"""Turn durations and counts of a step into rates; the only arithmetic of the metrics."""

import resource
import sys
from dataclasses import dataclass

from penstock.core import clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one step."""

    step_s: float
    tokens_per_s: float
    data_wait_share: float
    mfu: float


class StepMeter:
    """Times the parts of a step.

    Args:
        tokens_per_step: tokens of a step over all ranks.
        flops_per_token: of forward and backward.
        peak_flops: what all devices of the run could do per second.
    """

    def __init__(self, *, tokens_per_step: int, flops_per_token: float, peak_flops: float) -> None:
        self._tokens = tokens_per_step
        self._flops = flops_per_token
        self._peak = peak_flops
        self._start = self._got_batch = clock.monotonic()

    def start(self) -> None:
        """Mark the start of a step."""
        self._start = clock.monotonic()

    def got_batch(self) -> None:
        """Mark the moment the step's batch arrived."""
        self._got_batch = clock.monotonic()

    def finish(self) -> Rates:
        """Mark the end of the step."""
        step_s = max(clock.monotonic() - self._start, 1e-9)
        rate = self._tokens / step_s
        return Rates(
            step_s=step_s,
            tokens_per_s=rate,
            data_wait_share=(self._got_batch - self._start) / step_s,
            mfu=rate * self._flops / self._peak,
        )


def peak_memory_bytes() -> int:
    """Return the largest resident memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB

"""Turn durations and counts of a step into rates; the only arithmetic of the metrics."""

import resource
import sys
from collections.abc import Callable
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
        flops_per_token: of forward and backward, at a sequence length.
        peak_flops: what all devices of the run could do per second.
    """

    def __init__(self, *, flops_per_token: Callable[[int], float], peak_flops: float) -> None:
        self._flops = flops_per_token
        self._peak = peak_flops
        self._start = self._got_batch = clock.monotonic()

    def start(self) -> None:
        """Mark the start of a step."""
        self._start = clock.monotonic()

    def got_batch(self) -> None:
        """Mark the moment the step's batch arrived."""
        self._got_batch = clock.monotonic()

    def finish(self, *, rows: int, sequence_length: int) -> Rates:
        """Mark the end of the step.

        Args:
            rows: of the step, over all ranks.
        """
        step_s = max(clock.monotonic() - self._start, 1e-9)
        rate = rows * sequence_length / step_s
        return Rates(
            step_s=step_s,
            tokens_per_s=rate,
            data_wait_share=(self._got_batch - self._start) / step_s,
            mfu=rate * self._flops(sequence_length) / self._peak,
        )


def peak_memory_bytes() -> int:
    """Return the largest resident memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB

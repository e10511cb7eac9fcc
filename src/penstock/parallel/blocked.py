"""Count the seconds that this process blocks on other ranks: communication that nothing hides.

There is one counter a process, and whatever waits adds to it: gathers and reductions of shards and of
copies (fsdp_waits.py), collectives inside the forward and backward passes (collectives.py), stages of a
pipeline (pipeline.py). On a CPU a collective blocks who calls it. On a GPU the call only queues it: there,
what is counted says nothing, and nobody asks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core import clock


class Blocked:
    """Seconds blocked so far."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return them."""
        return self._seconds

    def add(self, seconds: float) -> None:
        """Count more."""
        self._seconds += seconds


BLOCKED = Blocked()
"""The counter of this process."""


@contextmanager
def waiting() -> Iterator[None]:
    """Count what happens inside as blocked."""
    start = clock.monotonic()
    try:
        yield
    finally:
        BLOCKED.add(clock.monotonic() - start)

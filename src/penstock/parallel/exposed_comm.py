"""Exposed communication: seconds that this process blocks on other ranks.

There is one counter per process, and every wait adds to it: gathers and reductions of shards and replicas
(fsdp_waits.py), collectives in forward and backward passes (collectives.py), pipeline stages (pipeline.py).
On a CPU a collective blocks its caller. On a GPU the call only queues it, so the counter is meaningless
there, and not used.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core import clock


class Blocked:
    """Counter of blocked seconds."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self._seconds

    def add(self, seconds: float) -> None:
        """Add seconds."""
        self._seconds += seconds


BLOCKED = Blocked()
"""Counter of this process."""


@contextmanager
def waiting() -> Iterator[None]:
    """Context manager: the time inside counts as blocked."""
    start = clock.monotonic()
    try:
        yield
    finally:
        BLOCKED.add(clock.monotonic() - start)

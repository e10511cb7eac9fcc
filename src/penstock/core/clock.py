"""The only place that reads the time."""

import time
from datetime import UTC, datetime


def monotonic() -> float:
    """Seconds from an arbitrary start; never goes back."""
    return time.perf_counter()


def cpu_seconds() -> float:
    """CPU seconds used by this process, all threads."""
    return time.process_time()


def utc_now() -> str:
    """The present moment as ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)

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


def unix_seconds() -> float:
    """Seconds since 1970, to hold against the times of files; may jump."""
    return time.time()


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)

"""Clock: the only module that reads the time."""

import time
from datetime import UTC, datetime


def monotonic() -> float:
    """Return seconds since an arbitrary start; never decreases."""
    return time.perf_counter()


def cpu_seconds() -> float:
    """Return the CPU seconds used by all threads of this process."""
    return time.process_time()


def utc_now() -> str:
    """Return the present time as ISO 8601, UTC, in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def unix_seconds() -> float:
    """Return seconds since 1970, comparable to file times; may jump."""
    return time.time()


def sleep(seconds: float) -> None:
    """Block for a number of seconds."""
    time.sleep(seconds)

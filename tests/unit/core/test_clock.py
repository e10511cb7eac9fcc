"""Clocks."""

from datetime import UTC, datetime

from penstock.core import clock


def test_the_monotonic_clock_and_cpu_time_do_not_go_back() -> None:
    start, cpu_start = clock.monotonic(), clock.cpu_seconds()
    sum(range(10_000))
    assert clock.monotonic() > start
    assert clock.cpu_seconds() >= cpu_start


def test_the_present_is_utc_in_whole_seconds() -> None:
    now = clock.utc_now()
    assert now.endswith("+00:00")
    assert "." not in now
    assert abs((datetime.now(UTC) - datetime.fromisoformat(now)).total_seconds()) < 60

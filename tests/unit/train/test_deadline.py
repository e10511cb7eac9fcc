"""The deadline of a stop: it ends who is late, and nobody else."""

import threading

from penstock.core import clock
from penstock.train.deadline import Deadline


def test_who_is_late_is_ended_once():
    ended = threading.Event()
    with Deadline(0.01, says=True, end=ended.set) as deadline:
        deadline.requested(clock.monotonic())
        deadline.requested(clock.monotonic())
        assert ended.wait(60)


def test_who_leaves_in_time_is_not_ended():
    ended = threading.Event()
    with Deadline(600.0, says=True, end=ended.set) as deadline:
        deadline.requested(clock.monotonic())
    assert not ended.is_set()


def test_time_counts_from_the_request():
    ended = threading.Event()
    with Deadline(600.0, says=True, end=ended.set) as deadline:
        deadline.requested(clock.monotonic() - 600)
        assert ended.wait(60)


def test_without_a_limit_nothing_is_started():
    ended = threading.Event()
    with Deadline(0.0, says=True, end=ended.set) as deadline:
        deadline.requested(clock.monotonic() - 1e6)
    assert not ended.is_set()

"""The deadline of a stop: it ends who is late, and nobody else."""

import threading

import pytest

from penstock.core import clock
from penstock.train.monitors.deadline import Deadline


def stop(deadline, error):
    with deadline:
        deadline.requested(clock.monotonic())
        raise error


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


def test_whose_peer_left_at_its_deadline_leaves_at_its_own():
    ended = threading.Event()
    with pytest.raises(RuntimeError):
        stop(Deadline(0.2, says=True, end=ended.set), RuntimeError("Read error: Connection closed by peer"))
    assert ended.is_set()


def test_a_failure_of_another_kind_does_not_wait_for_the_deadline():
    ended = threading.Event()
    with pytest.raises(RuntimeError):
        stop(Deadline(600.0, says=True, end=ended.set), RuntimeError("shapes differ"))
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

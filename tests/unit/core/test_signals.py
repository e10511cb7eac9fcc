"""Requests to stop become a flag; only a second Ctrl-C interrupts."""

import os
import signal
from collections.abc import Iterator

import pytest

from penstock.core import clock
from penstock.core.signals import StopFlag


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    """Send this process a signal; Python runs the handler before the next line."""
    os.kill(os.getpid(), number)


def test_nobody_has_asked_at_first() -> None:
    assert StopFlag().install().requested_by is None


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_becomes_its_name(name: str) -> None:
    flag = StopFlag().install()
    send(signal.Signals[name])
    assert flag.requested_by == name


def test_a_second_ctrl_c_interrupts() -> None:
    flag = StopFlag().install()
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert flag.requested_by == "SIGINT"


def test_a_second_sigterm_and_one_ctrl_c_after_it_do_not_interrupt() -> None:
    flag = StopFlag().install()
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    send(signal.SIGINT)
    assert flag.requested_by == "SIGINT"


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_what_a_launcher_or_nohup_has_ignored_stays_ignored(name: str) -> None:
    signal.signal(signal.Signals[name], signal.SIG_IGN)
    flag = StopFlag().install()
    send(signal.Signals[name])
    assert flag.requested_by is None


def test_the_first_request_is_the_one_that_counts() -> None:
    before = clock.monotonic()
    flag = StopFlag().install()
    send(signal.SIGTERM)
    first = flag.requested_at
    send(signal.SIGTERM)
    assert before <= first == flag.requested_at

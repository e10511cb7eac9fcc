"""Requests to stop become a flag; only a second Ctrl-C interrupts."""

import hashlib
import os
import signal
import threading
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


ENDED = 75


def ended_by_signal(work) -> int:
    """Return the exit code of a forked process that a signal reaches within `work`, a call of its flag."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            flag = StopFlag().install()
            os.write(writer, b"x")
            work(flag)
        finally:
            os._exit(1)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    os.close(reader)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def in_one_call(flag: StopFlag) -> None:
    """Start for minutes in one call that does not return to the interpreter, as torch fills memory."""
    with flag.starting(lambda _: os._exit(ENDED)):
        hashlib.pbkdf2_hmac("sha512", b"", b"", 2**31 - 1)


def in_many_calls(flag: StopFlag) -> None:
    with flag.starting(lambda _: os._exit(ENDED)):
        threading.Event().wait(100)


@pytest.mark.parametrize("start", [in_one_call, in_many_calls])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_signal_ends_a_start_whatever_it_does(start) -> None:
    assert ended_by_signal(start) == ENDED


def test_a_signal_before_the_start_ends_it_and_one_after_it_becomes_a_flag() -> None:
    ended, flag = threading.Event(), StopFlag().install()
    with flag.starting(lambda _: ended.set()) as begin:
        begin()
        send(signal.SIGTERM)
        assert flag.requested_by == "SIGTERM"
        assert not ended.is_set()
    with flag.starting(lambda _: ended.set()):
        assert ended.wait(60)


def test_a_start_with_patience_may_begin_and_look_at_the_flag() -> None:
    ended, flag = threading.Event(), StopFlag().install()
    with flag.starting(lambda _: ended.set(), patience_s=60) as begin:
        send(signal.SIGTERM)
        begin()
    assert (flag.requested_by, ended.is_set()) == ("SIGTERM", False)


def test_until_the_start_a_signal_ends_the_process_at_once() -> None:
    ended: list[str] = []
    flag = StopFlag().install(ended.append)
    send(signal.SIGTERM)
    assert ended == ["SIGTERM"]
    with flag.starting(lambda _: None) as begin:
        begin()
        send(signal.SIGINT)
    assert ended == ["SIGTERM"]

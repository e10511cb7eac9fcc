"""The local launcher with real forked processes: one job that fails, stops and dies as a whole."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, PeerLost, PenstockError, UsageError
from penstock.launch import local
from penstock.launch.local import EXIT_STOPPED, JobOutcome, run

# Python 3.12 warns of a fork where other tests have left library threads; these children use none.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def explain(error: BaseException) -> tuple[str, int]:
    if isinstance(error, PenstockError):
        return str(error), error.exit_code
    raise error


def rank() -> int:
    return int(os.environ["RANK"])


def outcome_of(work: Callable[[], int], *, processes: int = 2) -> JobOutcome:
    return run(work, explain, processes=processes)


def wait_for_ever() -> int:
    while True:
        signal.pause()


def test_every_process_knows_its_rank_and_how_many_there_are(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

    def work() -> int:
        (tmp_path / str(rank())).write_text(" ".join(os.environ[name] for name in names))
        return 0

    assert outcome_of(work, processes=3) == JobOutcome(0, [])
    assert [(tmp_path / str(i)).read_text() for i in range(3)] == ["0 0 3 3", "1 1 3 3", "2 2 3 3"]


def test_the_processes_share_a_rendezvous_that_is_gone_afterwards(tmp_path: Path) -> None:
    def work() -> int:
        (tmp_path / str(rank())).write_text(os.environ["PENSTOCK_RENDEZVOUS"])
        return 0

    outcome_of(work)
    first, second = ((tmp_path / str(i)).read_text() for i in range(2))
    assert first == second
    assert first.startswith("file:///")
    assert not Path(first.removeprefix("file://")).parent.exists()


def test_the_parents_environment_stays_as_it_was() -> None:
    before = dict(os.environ)
    outcome_of(lambda: 0)
    assert dict(os.environ) == before


def test_the_parents_signal_handlers_and_mask_stay_as_they_were() -> None:
    def handlers() -> list[object]:
        return [
            *(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
        ]

    before = handlers()
    outcome_of(lambda: 0)
    assert handlers() == before


@pytest.mark.parametrize("processes", [0, -1])
def test_fewer_than_one_process_is_refused(processes: int) -> None:
    with pytest.raises(UsageError, match=rf"--processes must be at least 1 \(got {processes}\)"):
        outcome_of(lambda: 0, processes=processes)


def test_a_stop_of_all_processes_is_a_stop_and_not_a_failure() -> None:
    assert outcome_of(lambda: EXIT_STOPPED) == JobOutcome(EXIT_STOPPED, [])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_outranks_a_stop_whichever_rank_it_is_on(failing: int) -> None:
    assert outcome_of(lambda: 3 if rank() == failing else EXIT_STOPPED) == JobOutcome(3, [])


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill ranks that do not end by themselves after half a second."""
    monkeypatch.setattr(local, "_GRACE_S", 0.5)


@pytest.mark.usefixtures("short_grace")
def test_the_first_failure_stops_the_others() -> None:
    assert outcome_of(lambda: 4 if rank() == 1 else wait_for_ever(), processes=3) == JobOutcome(4, [])


def test_a_frozen_process_hears_that_it_must_stop(tmp_path: Path) -> None:
    def leave(*_: object) -> None:
        (tmp_path / "heard").touch()
        os._exit(0)

    def work() -> int:
        if rank() == 1:
            signal.signal(signal.SIGTERM, leave)
            (tmp_path / "frozen.tmp").write_text(str(os.getpid()))
            (tmp_path / "frozen.tmp").rename(tmp_path / "frozen")
            os.kill(os.getpid(), signal.SIGSTOP)
            return wait_for_ever()
        while not (tmp_path / "frozen").exists():
            os.sched_yield()
        while ") T " not in Path(f"/proc/{(tmp_path / 'frozen').read_text()}/stat").read_text():
            os.sched_yield()
        return 4

    assert outcome_of(work) == JobOutcome(4, [])
    assert (tmp_path / "heard").exists()


def test_an_error_gives_its_paragraph_and_its_exit_code() -> None:
    def work() -> int:
        raise ConfigError("It is wrong", got=3, fix="Right it.")

    assert outcome_of(work, processes=1) == JobOutcome(2, ["It is wrong (got 3). Right it."])


def test_the_same_message_of_many_processes_is_said_once() -> None:
    def work() -> int:
        raise PenstockError("The disk is full")

    assert outcome_of(work, processes=4) == JobOutcome(1, ["The disk is full."])


@pytest.mark.parametrize("has_cause", [True, False])
def test_lost_contact_is_said_only_without_a_cause(has_cause: bool) -> None:
    def work() -> int:
        if rank() == 0 and has_cause:
            raise PenstockError("The disk is full")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent as soon as another one has failed
        raise PeerLost(f"Connection closed by peer [127.0.0.1]:{4000 + rank()}")

    (said,) = outcome_of(work, processes=3).messages
    if has_cause:
        assert said == "The disk is full."
    else:
        assert re.search(r"lost contact .* \(got 'Connection closed by peer .*:400\d'\)", said)


def test_the_cause_is_waited_for_after_lost_contact() -> None:
    def work() -> int:
        if rank() == 0:
            time.sleep(0.3)  # between the end of its sockets and its message
            raise ConfigError("It is wrong", got=3)
        raise PeerLost("Connection closed by peer")

    assert outcome_of(work, processes=3) == JobOutcome(2, ["It is wrong (got 3)."])


def test_a_rank_whose_death_its_peers_see_first_is_named() -> None:
    def work() -> int:
        if rank() == 0:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise PeerLost("Connection closed by peer")

    outcome = outcome_of(work, processes=3)
    assert (outcome.code, outcome.lost) == (1, (0,))
    assert outcome.messages[0].startswith("Rank 0 was killed by SIGKILL.")


def test_a_rank_that_the_watchdog_of_nccl_ends_is_no_cause() -> None:
    def work() -> int:
        if rank() == 0:
            time.sleep(0.3)
            os.abort()
        raise PeerLost("Connection closed by peer")

    outcome = outcome_of(work, processes=3)
    assert (outcome.code, outcome.lost) == (1, ())
    assert PeerLost.SENTENCE in outcome.messages[0]


def test_ranks_that_hear_nothing_after_lost_contact_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_CAUSE_S", 0.2)

    def work() -> int:
        if rank() == 0:
            return wait_for_ever()
        raise PeerLost("Connection closed by peer")

    outcome = outcome_of(work, processes=3)
    assert (outcome.code, outcome.lost) == (1, ())
    assert PeerLost.SENTENCE in outcome.messages[0]


def test_an_error_nobody_can_explain_shows_its_traceback_and_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise RuntimeError("a bug of ours")

    assert outcome_of(work, processes=1) == JobOutcome(1, [])
    shown = capfd.readouterr().err
    assert "Traceback" in shown
    assert "RuntimeError: a bug of ours" in shown


def test_a_message_longer_than_a_pipe_does_not_hang_the_job() -> None:
    def work() -> int:
        raise PenstockError("x" * 2**20)

    outcome = outcome_of(work, processes=1)
    assert outcome.code == 1
    assert outcome.messages[0].startswith("xxx")


@pytest.mark.usefixtures("short_grace")
def test_a_killed_process_is_named_by_its_rank_and_its_signal_and_stops_the_job() -> None:
    def work() -> int:
        if rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return wait_for_ever()

    assert outcome_of(work) == JobOutcome(
        1, ["Rank 0 was killed by SIGKILL. The machine may have run out of memory: see dmesg."], lost=(0,)
    )


@pytest.mark.usefixtures("short_grace")
def test_a_job_that_lost_a_process_starts_anew_on_as_many_as_it_is_told() -> None:
    def work() -> int:
        if rank() == 1 and os.environ["WORLD_SIZE"] == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        return wait_for_ever() if os.environ["WORLD_SIZE"] == "3" else 0

    ended = []

    def again(outcome: JobOutcome) -> int:
        ended.append((outcome.code, outcome.lost))
        return 2 if outcome.lost else 0

    assert run(work, explain, processes=3, again=again) == JobOutcome(0, [])
    assert ended == [(1, (1,)), (0, ())]


def test_a_process_that_fails_by_itself_is_not_lost() -> None:
    def work() -> int:
        raise PenstockError("wrong")

    assert outcome_of(work).lost == ()


def test_processes_that_end_one_after_another_with_many_threads_are_not_taken_for_hung() -> None:
    """Their pipe closes before their exit code is known, and the longer the more threads they had."""

    def work() -> int:
        for _ in range(30):
            threading.Thread(target=wait_for_ever_in_a_thread, daemon=True).start()
        return 0

    for _ in range(10):  # the mistake this guards against showed in eight jobs of ten
        assert outcome_of(work, processes=4) == JobOutcome(0, [])


def wait_for_ever_in_a_thread() -> None:
    threading.Event().wait()


def test_output_of_the_processes_is_flushed_before_they_end(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        print("said by", rank())
        return 0

    outcome_of(work)
    assert sorted(capfd.readouterr().out.splitlines()) == ["said by 0", "said by 1"]


def test_output_the_parent_had_not_flushed_is_not_said_twice(tmp_path: Path) -> None:
    code = "print('once'); from penstock.launch.local import run; run(lambda: 0, str, processes=2)"
    with (tmp_path / "out").open("w") as out:  # a file, so that the parent's print stays in its buffer
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "once\n"


# Signals: the parent is a process of its own, in a process group of its own as under a shell.

_PARENT = """
import os, signal, sys, threading, time
from penstock.core.signals import StopFlag
from penstock.launch.local import EXIT_STOPPED, run

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

{setup}

def work():
{work}

outcome = run(work, lambda error: (str(error), 1), processes=2, again={again})
say("outcome", outcome.code, outcome.messages)
"""


@contextmanager
def parent(work: str, *, setup: str = "", again: str = "lambda _: 0") -> Iterator[subprocess.Popen[str]]:
    """Start a parent of two processes that run the lines of `work`."""
    indented = "\n".join(f"    {line}" for line in work.strip().splitlines())
    code = _PARENT.format(setup=setup, work=indented, again=again)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().strip() for _ in range(count))


STOP_ONCE = """
seen = []
signal.signal(signal.SIGTERM, lambda *_: (seen.append(1), say("stopping")))
say("ready")
while not seen:
    time.sleep(0.01)
return EXIT_STOPPED
"""

STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: say("no"))
say("ready")
while True:
    time.sleep(0.01)  # signal.pause() would miss a signal that comes just before it
"""


def test_sigterm_to_the_parent_stops_every_process() -> None:
    with parent(STOP_ONCE) as process:
        assert lines(process, 2) == ["ready", "ready"]
        os.kill(process.pid, signal.SIGTERM)
        assert lines(process, 3) == ["outcome 75 []", "stopping", "stopping"]


def test_a_job_that_was_told_to_stop_is_not_started_anew() -> None:
    with parent(STOP_ONCE, again="lambda _: 2") as process:
        assert lines(process, 2) == ["ready", "ready"]
        os.kill(process.pid, signal.SIGTERM)
        assert lines(process, 3) == ["outcome 75 []", "stopping", "stopping"]


def test_ctrl_c_reaches_the_processes_once_and_as_sigterm() -> None:
    counting = STOP_ONCE.replace("return", 'say("interrupts", signal.getsignal(signal.SIGINT).name)\nreturn')
    with parent(counting) as process:
        assert lines(process, 2) == ["ready", "ready"]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        found = lines(process, 5)
        assert found == ["interrupts SIG_IGN"] * 2 + ["outcome 75 []"] + ["stopping"] * 2


def test_a_terminal_that_is_closed_stops_every_process_once() -> None:
    with parent(STOP_ONCE, setup="signal.signal(signal.SIGHUP, signal.SIG_DFL)") as process:
        assert lines(process, 2) == ["ready", "ready"]
        os.killpg(process.pid, signal.SIGHUP)
        assert lines(process, 3) == ["outcome 75 []", "stopping", "stopping"]


def test_under_nohup_a_closed_terminal_stops_nobody() -> None:
    with parent(STOP_ONCE, setup="signal.signal(signal.SIGHUP, signal.SIG_IGN)") as process:
        assert lines(process, 2) == ["ready", "ready"]
        os.killpg(process.pid, signal.SIGHUP)
        os.kill(process.pid, signal.SIGTERM)
        assert lines(process, 3) == ["outcome 75 []", "stopping", "stopping"]


def test_a_second_ctrl_c_kills_processes_that_do_not_stop() -> None:
    with parent(STUBBORN) as process:
        assert lines(process, 2) == ["ready", "ready"]
        os.kill(process.pid, signal.SIGINT)
        assert lines(process, 2) == ["no", "no"]
        os.kill(process.pid, signal.SIGINT)
        assert lines(process, 1) == ["outcome 130 ['Interrupted.']"]


def test_sigterm_sent_twice_does_not_kill() -> None:
    with parent(STUBBORN) as process:
        assert lines(process, 2) == ["ready", "ready"]
        for _ in range(2):
            os.kill(process.pid, signal.SIGTERM)
            assert lines(process, 2) == ["no", "no"]


def test_the_processes_die_with_a_parent_that_is_killed() -> None:
    with parent(STUBBORN) as process:
        assert lines(process, 2) == ["ready", "ready"]
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == "", "end of file: nobody holds the other end any more"


def test_sigterm_between_two_forks_reaches_every_process() -> None:
    """A scheduler may ask only once, and the first process is forked long before the last."""
    setup = """
flag = StopFlag().install()
parent, forks = os.getpid(), []
def ask_once():
    forks.append(1)
    if len(forks) == 1:
        os.kill(parent, signal.SIGTERM)
os.register_at_fork(after_in_parent=ask_once)
"""
    work = """
while flag.requested_by is None:
    time.sleep(0.01)
say("asked by", flag.requested_by)
return EXIT_STOPPED
"""
    with parent(work, setup=setup) as process:
        assert lines(process, 3) == ["asked by SIGTERM"] * 2 + ["outcome 75 []"]


def test_a_process_that_cannot_be_started_ends_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], BaseProcess.start

    def start_two(process: BaseProcess) -> None:
        if len(started) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(process)
        started.append(process.pid)

    monkeypatch.setattr(BaseProcess, "start", start_two)
    with pytest.raises(PenstockError, match="Process 3 of 4 cannot be started: Resource temporarily"):
        outcome_of(wait_for_ever, processes=4)
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_an_error_of_the_parent_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int | None] = []

    def fail(children: dict[BaseProcess, object]) -> JobOutcome:
        started.extend(child.pid for child in children)
        raise MemoryError

    monkeypatch.setattr(local, "_wait", fail)
    with pytest.raises(MemoryError):
        outcome_of(wait_for_ever)
    assert len(started) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)

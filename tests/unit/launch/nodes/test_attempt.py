"""Attempts that a warm process forks: codes, logs, stops, and ends of all kinds."""

import multiprocessing
import os
import signal
import threading
import time
from functools import partial

import pytest

from penstock.core.signals import StopFlag
from penstock.launch import local
from penstock.launch.local import EXIT_STOPPED
from penstock.launch.nodes.attempt import WarmProcess, follow, rank_environments

ENVIRONMENTS = rank_environments(node=0, num_nodes=1, processes=2, address="127.0.0.1", port=1)


def explain(error):
    return f"It was {error}.", 3


def outcome_of(warm):
    end = time.monotonic() + 60
    while (outcome := warm.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return outcome


@pytest.fixture
def log(tmp_path):
    return lambda rank: tmp_path / f"{rank}.log"


@pytest.fixture
def opened(log):
    made = []

    def make(work):
        made.append(WarmProcess(work, explain, log))
        return made[-1]

    yield make
    for warm in made:
        warm.close()


def speak():
    os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n".encode())
    return 0


def test_each_rank_prints_into_its_own_log_start_after_start(opened, log):
    warm = opened(speak)
    for start in ("one", "two"):
        warm.start(ENVIRONMENTS, title=start)
        assert outcome_of(warm).code == 0
    assert log(1).read_text().splitlines() == [
        "--- one: rank 1 of 2 ---",
        "rank 1 of 2",
        "--- two: rank 1 of 2 ---",
        "rank 1 of 2",
    ]


def follow_into_a_closed_pipe(path, parent):
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    threading.Timer(0.2, path.write_text, ("a line\n",)).start()
    follow(path, parent=parent)


def test_a_log_that_nobody_reads_on_ends_its_follower_quietly(tmp_path, capfd):
    arguments = (tmp_path / "0.log", os.getpid())
    follower = multiprocessing.get_context("fork").Process(target=follow_into_a_closed_pipe, args=arguments)
    follower.start()
    follower.join(60)
    code = follower.exitcode
    follower.kill()
    follower.join()
    follower.close()
    assert (code, capfd.readouterr().err) == (0, "")


def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1")
    time.sleep(60)
    return 0


def test_a_failure_has_its_message_and_ends_the_others(opened, monkeypatch):
    monkeypatch.setattr(local, "_GRACE_S", 0.5)  # the other ignores its signal, and is killed
    warm = opened(fail)
    warm.start(ENVIRONMENTS, title="start")
    outcome = outcome_of(warm)
    assert (outcome.code, outcome.messages[0]) == (3, "It was rank 1.")


def wait_for_stop():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_STOPPED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.write(1, b"ready\n")
    time.sleep(60)
    return 0


def await_ready(log):
    end = time.monotonic() + 60
    while not all(log(rank).is_file() and "ready" in log(rank).read_text() for rank in range(2)):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stop_reaches_every_rank(opened, log):
    warm = opened(wait_for_stop)
    warm.start(ENVIRONMENTS, title="start")
    await_ready(log)
    warm.stop()
    outcome = outcome_of(warm)
    assert (outcome.code, outcome.stop_requested) == (EXIT_STOPPED, True)


def install_late():
    os.write(1, b"ready\n")
    time.sleep(0.5)
    flag = StopFlag().install()
    time.sleep(0.1)
    return EXIT_STOPPED if flag.requested_by else 4


def test_a_stop_waits_until_a_rank_can_handle_it(opened, log):
    warm = opened(install_late)
    warm.start(ENVIRONMENTS, title="start")
    await_ready(log)
    warm.stop()
    assert outcome_of(warm).code == EXIT_STOPPED


def test_a_kill_ends_the_ranks_and_is_told(opened, log):
    warm = opened(wait_for_stop)
    warm.start(ENVIRONMENTS, title="start")
    await_ready(log)
    warm.kill()
    assert outcome_of(warm).code == 1
    warm.start(ENVIRONMENTS, title="again")
    warm.kill()
    assert outcome_of(warm).code == 1


def write_pid(folder):
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)
    return 0


def test_no_rank_outlives_the_process_that_closes(log, tmp_path):
    folder = tmp_path / "pids"
    folder.mkdir()
    warm = WarmProcess(partial(write_pid, folder), explain, log)
    warm.start(ENVIRONMENTS, title="start")
    end = time.monotonic() + 60
    while len([path for path in folder.iterdir() if path.read_text()]) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    pids = [int(path.read_text()) for path in folder.iterdir()]
    warm.close()
    end = time.monotonic() + 10
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < end, "ranks are left"
        time.sleep(0.01)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def fail_at_length():
    raise ValueError(os.environ["RANK"] + "\u00e9" * 10_000)


def test_long_messages_of_many_ranks_do_not_hold_an_attempt_up(log):
    warm = WarmProcess(fail_at_length, explain, log)  # more than a pipe holds
    ranks = rank_environments(node=0, num_nodes=1, processes=8, address="127.0.0.1", port=1)
    warm.start(ranks, title="start")
    outcome = outcome_of(warm)
    warm.close()
    assert outcome.code == 3
    assert sum(map(len, outcome.messages)) > 65_536

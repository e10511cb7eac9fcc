"""The process that answers questions about runs: started by the first one, ended when idle, started again."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.console.workers import data_process
from penstock.console.workers.data_process import DataProcess, QuestionRefused
from tests.console_workers import fork_workers
from tests.launched import wait_until


@pytest.fixture
def begun(monkeypatch):
    """The processes that were started."""
    fork_workers(monkeypatch)
    found, start = [], data_process.start

    def begin():
        found.append(start())
        return found[-1]

    monkeypatch.setattr(data_process, "start", begin)
    return found


@pytest.fixture
def data(begun):  # noqa: ARG001
    found = DataProcess()
    yield found
    found.close()


def test_each_of_several_askers_gets_its_own_answer_from_one_process(data, begun, tmp_path):
    for number in range(6):
        (tmp_path / str(number) / "checkpoints" / f"step-{number:08d}").mkdir(parents=True)
        (tmp_path / str(number) / "checkpoints" / f"step-{number:08d}" / "checkpoint.json").write_text("{}")
        (tmp_path / str(number) / "config.json").write_text("{}")
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(data.ask, "checkpoints", tmp_path / str(number)) for number in range(6)]
    assert [each.result()["steps"] for each in asked] == [[number] for number in range(6)]
    assert len(begun) == 1


def test_a_refusal_has_its_status_and_the_process_stays(data, begun, tmp_path):
    with pytest.raises(QuestionRefused, match=r"is not a folder\.") as caught:
        data.ask("request", tmp_path / "none", asked={"batch_size": 3}, asked_by="me")
    assert caught.value.status == 400
    with pytest.raises(QuestionRefused, match="cannot be answered: KeyError") as caught:
        data.ask("weather", tmp_path)
    assert caught.value.status == 500
    assert data.ask("requests", tmp_path) == {"requests": [], "running": False}
    assert len(begun) == 1


def test_a_process_that_was_killed_is_a_sentence_and_another_one_answers(data, begun, tmp_path):
    data.ask("requests", tmp_path)
    begun[0].send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(data.ask, "requests", tmp_path)
        wait_until(lambda: data._running.num_open, "the question is open")
        os.kill(begun[0].pid, signal.SIGKILL)
        with pytest.raises(QuestionRefused, match=r"has ended\. Ask again") as caught:
            asked.result(60)
    assert caught.value.status == 503
    begun[0].wait()
    assert data.ask("requests", tmp_path)["requests"] == []
    assert len(begun) == 2


def test_a_process_is_ended_while_its_last_answer_is_read(data, begun, tmp_path):
    data.ask("requests", tmp_path)
    begun[0].send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(data.ask, "requests", tmp_path)
        wait_until(lambda: data._running.num_open, "the question is open")
        with data._lock:  # what `close` does, while the reader waits for this lock
            begun[0].send_signal(signal.SIGCONT)
            asked.result(60)
            data._end()
    assert begun[0].poll() is not None


def test_an_answer_that_cannot_be_read_is_a_refusal_and_another_process_answers(begun, monkeypatch, tmp_path):
    script = 'import time; input(); print(\'{"id": 1, "answer"\', flush=True); time.sleep(1000)'
    words = [sys.executable, "-c", script]  # an interpreter: a process that writes half an answer and stays
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    starts = iter([lambda: subprocess.Popen(words, **pipes), data_process.start])
    monkeypatch.setattr(data_process, "start", lambda: next(starts)())
    data = DataProcess()
    with pytest.raises(QuestionRefused, match=r"has ended\. Ask again"):
        data.ask("requests", tmp_path)
    wait_until(lambda: not data._running.is_alive, "nobody reads it")
    assert data.ask("requests", tmp_path)["requests"] == []
    assert len(begun) == 1
    data.close()


def test_an_idle_process_is_ended_and_the_next_question_starts_one(begun, tmp_path):
    data = DataProcess(idle_s=0.01)
    data.ask("requests", tmp_path)
    wait_until(lambda: begun[0].poll() is not None, "nobody asks")
    assert data.ask("requests", tmp_path)["running"] is False
    data.close()
    assert all(process.poll() is not None for process in begun)
    with pytest.raises(QuestionRefused, match="ending"):
        data.ask("requests", tmp_path)

"""Files that the pods of a run share: the meeting before the doctor, logs of ranks."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from functools import partial

import pytest

from penstock.launch.engines.engine import stop_between_starts
from penstock.launch.job_folder import JobFolder
from penstock.launch.local import EXIT_STOPPED
from penstock.launch.pods import node as pod_node
from penstock.launch.pods.node import EVENT, PROGRESS, _print_logs, _RunPrinter, new_lines, run_pod
from penstock.launch.pods.preflight import _all_there
from penstock.obs.metric_names import METRICS_FILE
from tests.unit.launch.render.test_kubernetes import make_pod_spec


def test_a_pod_still_at_the_meeting_when_it_is_cleared_away_goes_on(tmp_path):
    folder = JobFolder(tmp_path)
    folder.make()

    def clear():
        while not (folder.path / "examined-j1" / "1").exists():
            time.sleep(0.01)
        shutil.rmtree(folder.path / "examined-j1")

    thread = threading.Thread(target=clear)
    thread.start()
    assert _all_there(make_pod_spec(), folder, node=1, job="j1") is False
    thread.join()


def print_once(folder, scratch, parent):
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    os.kill(os.getpid(), signal.SIGTERM)
    _print_logs(folder, scratch, False, parent)


def test_a_rank_that_printed_nothing_costs_the_shared_volume_nothing(tmp_path):
    folder, scratch = JobFolder(tmp_path / "run"), tmp_path / "scratch"
    folder.make()
    scratch.mkdir()
    (scratch / "rank-00000.log").touch()
    (scratch / "rank-00001.log").write_text("a line\n")
    context = multiprocessing.get_context("fork")
    process = context.Process(target=print_once, args=(folder, scratch, os.getpid()))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert folder.ranks_with_logs() == [1]


def print_first(folder, scratch, parent):
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    os.kill(os.getpid(), signal.SIGTERM)
    _print_logs(folder, scratch, True, parent)


def test_the_first_pod_prints_earlier_transitions_and_how_far_the_run_is(tmp_path, capfd):
    folder, scratch = JobFolder(tmp_path / "run"), tmp_path / "scratch"
    folder.make()
    scratch.mkdir()
    folder.log_event("lost", node=1, cause="of a pod whose log is gone")
    record = {"step": 7, "loss": 2.5, "tokens_per_s": 100.0}
    (folder.run / METRICS_FILE).write_text(json.dumps(record) + "\n" + '{"step": 8, "lo')
    context = multiprocessing.get_context("fork")
    process = context.Process(target=print_first, args=(folder, scratch, os.getpid()))
    process.start()
    process.join(60)
    event, progress = capfd.readouterr().out.splitlines()
    assert json.loads(event.removeprefix(EVENT))["cause"] == "of a pod whose log is gone"
    assert json.loads(progress.removeprefix(PROGRESS)) == {**record, "checkpoint": None}


def test_transitions_are_read_again_only_if_there_are_new_ones(tmp_path, capfd, monkeypatch):
    folder = JobFolder(tmp_path)
    folder.make()
    reads, events = [], JobFolder.events
    monkeypatch.setattr(JobFolder, "events", lambda self: reads.append(1) or events(self))
    printer = _RunPrinter(folder)
    for cause in ("a", "b"):
        folder.log_event("start", cause=cause)
        for _ in range(3):
            printer.print(is_last=False)
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith(EVENT)]
    assert [json.loads(line.removeprefix(EVENT))["cause"] for line in printed] == ["a", "b"]
    assert len(reads) == 3, "once to begin with, and once for each"


@pytest.mark.parametrize("content", [b"a\nbc", b"x" * (5 << 19), b"x\n" * (5 << 18), b"", b"x" * (1 << 20)])
def test_a_log_is_read_in_bounded_parts_of_whole_lines_and_to_its_last_byte(tmp_path, content):
    (tmp_path / "log").write_bytes(content)
    parts = []
    for is_last in (False, True):
        while part := new_lines(tmp_path / "log", sum(map(len, parts)), is_last=is_last):
            assert len(part) <= 1 << 20
            assert is_last or part.endswith(b"\n") or len(part) == 1 << 20
            parts.append(part)
    assert b"".join(parts) == content


def test_a_pod_of_a_job_that_was_stopped_for_good_ends_at_once_and_is_not_replaced(tmp_path, monkeypatch):
    folder = JobFolder(tmp_path)
    folder.make()
    folder.ask_to_stop("j1")
    monkeypatch.setenv("PENSTOCK_JOB", "j1")
    explain = lambda error: (str(error), 1)  # noqa: E731
    code = run_pod(make_pod_spec(), folder, lambda: 1, explain, node=1, scratch=tmp_path / "s")
    assert code == 0


def test_pods_between_two_starts_are_stopped_by_a_mark(tmp_path, monkeypatch):
    folder = JobFolder(tmp_path)
    assert not stop_between_starts(folder), "none has started: nobody knows the job"
    monkeypatch.setenv("PENSTOCK_JOB", "j1")
    monkeypatch.setattr(pod_node, "is_examined", lambda *_, **__: False)
    monkeypatch.setattr(
        pod_node, "examine_pods", lambda *_, **__: False
    )  # told to stop, as its node is drained
    start = partial(run_pod, make_pod_spec(), folder, lambda: 1, lambda error: (str(error), 1), node=0)
    assert start(scratch=tmp_path / "s") == EXIT_STOPPED, "it is replaced"
    assert "end before they train" in stop_between_starts(folder)
    assert start(scratch=tmp_path / "s") == 0
    monkeypatch.setenv("PENSTOCK_JOB", "j2")  # the run was launched again
    assert start(scratch=tmp_path / "s") == EXIT_STOPPED
    folder.mark_finished("j2")
    assert not stop_between_starts(folder)

"""A rank that freezes or dies in mid-run: the job says which one it was, ends, and resumes."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from penstock.obs.sinks.jsonl import read_records
from tests.warm import Command, penstock


def steps_of(run):
    return [record["step"] for record in read_records(run / "metrics.jsonl") if "loss" in record]


def children_of(pid):
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def interrupted(words, run, interrupt, *, ranks):
    """Start a job without end and do something to its process after some steps; return how it ended."""
    command = [*words, "--set", "run.steps=1000000", "--processes", ranks]
    with Command(*command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 180
        while len(steps_of(run)) < 5:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        interrupt(process)
        _, said = process.communicate(timeout=180)
    return process.returncode, said


def hurt(words, run, number, *, rank):
    """Start three ranks, send one of them a signal after some steps; return how the job ended."""
    return interrupted(words, run, lambda process: os.kill(children_of(process.pid)[rank], number), ranks=3)


def resumes(words, run):
    """Train two steps more than were recorded; no step is missing, none is recorded twice."""
    last = max(steps_of(run))
    done = penstock(*words, "--set", f"run.steps={last + 2}", "--processes", "3")
    assert done.returncode == 0, done.stderr
    assert steps_of(run) == list(range(1, last + 3))


@pytest.fixture
def words(recipe, tmp_path):
    return ["train", str(recipe), "--set", f"run.dir={tmp_path / 'run'}", "--set", "checkpoint.every=2"]


def test_a_frozen_rank_is_named_the_job_ends_and_resumes(words, tmp_path):
    run = tmp_path / "run"
    code, said = hurt([*words, "--set", "guard.hang_s=6"], run, signal.SIGSTOP, rank=1)
    assert code == 1, said
    assert "No step was finished for" in said
    assert "Ranks 0, 2 wait in step" in said
    assert "Rank 1 wrote nothing: frozen, dead, or cut off" in said
    record = json.loads((run / "hangs" / "rank-00000.json").read_text())
    assert record["collectives"]
    assert any("loop.py" in call for call in record["stacks"]["MainThread"])
    resumes(words, run)


def test_a_killed_rank_ends_the_job_which_says_so_and_resumes(words, tmp_path):
    code, said = hurt(words, tmp_path / "run", signal.SIGKILL, rank=2)
    assert code == 1, said
    assert "Rank 2 was killed by SIGKILL" in said
    assert "Traceback" not in said
    resumes(words, tmp_path / "run")


def test_a_save_that_comes_too_late_for_the_scheduler_is_given_up(words, tmp_path):
    run = tmp_path / "run"
    in_no_time = [*words, "--set", "guard.stop_within_s=0.001"]
    code, said = interrupted(in_no_time, run, lambda process: process.terminate(), ranks=2)
    assert code == 75, said
    assert "not saved within 0.001 s of the request to stop" in said
    assert "Stopped on request" not in said
    resumes(words, run)

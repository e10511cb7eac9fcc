"""A rank that freezes in mid-run: the others say which one it was, the job ends, and training resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.conftest import penstock


def steps_of(run):
    file = run / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [record["step"] for record in records if "loss" in record]


def children_of(pid):
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_frozen_rank_is_named_the_job_ends_and_resumes(recipe, tmp_path):
    run = tmp_path / "run"
    words = ["train", str(recipe), "--set", f"run.dir={run}", "--set", "checkpoint.every=2"]
    patient = [*words, "--set", "run.steps=1000000", "--set", "guard.hang_s=8"]
    command = [sys.executable, "-m", "penstock", *patient, "--processes", "3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 180
        while len(steps_of(run)) < 5:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        frozen = children_of(process.pid)[1]
        os.kill(frozen, signal.SIGSTOP)
        _, said = process.communicate(timeout=180)
    assert process.returncode == 1, said
    assert "No step was finished for" in said
    assert "Ranks 0, 2 wait in step" in said
    assert "Rank 1 wrote nothing: frozen, gone, or cut off" in said
    record = json.loads((run / "hangs" / "rank-00000.json").read_text())
    assert record["collectives"]
    assert any("loop.py" in call for call in record["stacks"]["MainThread"])
    last = max(steps_of(run))
    done = penstock(*words, "--set", f"run.steps={last + 2}", "--processes", "3")
    assert done.returncode == 0, done.stderr
    assert steps_of(run) == list(range(1, last + 3))

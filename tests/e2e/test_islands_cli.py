"""Islands that are killed, leave and join while the job runs: no sample is lost or repeated."""

import getpass
import os
import re
import signal
import time
from pathlib import Path

from penstock.obs.sinks.jsonl import read_records
from tests.in_process import run_cli
from tests.warm import Command

SETTINGS = (
    "run.steps=1000000", "parallel.shard=1", "parallel.replicate=-1", "outer.every=4", "outer.min_islands=1",
    "checkpoint.every=4", "validate.every=0",
)  # fmt: skip


def wait_for(process, run, *, ranks, steps):
    """Wait until the job has trained some steps after it started on so many ranks; return its last step."""
    deadline = time.monotonic() + 180
    while True:
        records = list(read_records(run / "metrics.jsonl"))
        starts = [index for index, record in enumerate(records) if record.get("event") == "start"]
        if starts and records[starts[-1]]["ranks"] == ranks:
            since = [record["step"] for record in records[starts[-1] :] if "loss" in record]
            if len(since) >= steps:
                return since[-1]
        assert process.poll() is None, (run.parent / "said").read_text()
        assert time.monotonic() < deadline, records[-3:]
        time.sleep(0.05)


def children_of(pid):
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_job_goes_on_when_an_island_is_killed_and_when_others_join(recipe, tmp_path):
    run = tmp_path / "run"
    command = ["train", recipe, "--processes", 3]
    command += [word for setting in SETTINGS for word in ("--set", setting)]
    with (tmp_path / "said").open("w") as said, Command(*command, stderr=said) as process:
        reached = wait_for(process, run, ranks=3, steps=6)
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        assert wait_for(process, run, ranks=2, steps=6) > reached - 6
        asked = run_cli("control", run, "--islands", 4)
        assert asked.returncode == 0, asked.stderr
        assert "continues with 4 islands" in asked.stdout
        wait_for(process, run, ranks=4, steps=6)
        refused = run_cli("control", run, "--islands", 5)
        assert refused.returncode == 1
        assert "does not divide" in refused.stderr
        process.terminate()
        process.wait(timeout=180)
    words = " ".join((tmp_path / "said").read_text().split())
    assert process.returncode == 75, words
    assert re.search(r"Rank \d was killed by SIGKILL", words)
    assert "The run continues with 2 islands." in words
    audited = run_cli("data", "audit", run)
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert [r["ranks"] for r in read_records(run / "metrics.jsonl") if r.get("event") == "start"] == [3, 2, 4]
    requests = [r for r in read_records(run / "metrics.jsonl") if r.get("event") == "request"]
    assert [(r["taken_up"], r["asked_by"]) for r in requests] == [
        (taken, getpass.getuser()) for taken in (1, 0)
    ]
    late = run_cli("control", run, "--islands", 2)
    assert late.returncode == 2
    assert f"No job runs on {run.name}. Start it with --processes" in " ".join(late.stderr.split())

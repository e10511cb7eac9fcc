"""`penstock train` as a user runs it: stopped, killed, rescaled, and still the same run."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from penstock.core.signals import STOPPED_EARLY
from penstock.obs.sinks.jsonl import read_records
from tests.in_process import run_cli
from tests.warm import Command, penstock

SIGNALS = "its signals and exit codes are those that a user meets"


def records_of(run):
    return read_records(run / "metrics.jsonl")


def losses_of(run):
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records_of(run) if "loss" in r}


def interrupt(recipe, run, number, *, processes, at_step):
    """Start a run, send it a signal once it has logged `at_step`, return its exit code."""
    words = ["train", str(recipe), "--set", f"run.dir={run}", "--processes", str(processes)]
    interpreter = SIGNALS if number == signal.SIGTERM else ""
    with Command(*words, interpreter=interpreter, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if at_step in losses_of(run):
                break
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        os.kill(process.pid, number)
        process.communicate(timeout=120)
        return process.returncode


def test_a_run_stopped_resumed_and_rescaled_trains_on_every_sample_once(recipe, tmp_path):
    run = tmp_path / "run"
    assert interrupt(recipe, run, signal.SIGTERM, processes=2, at_step=7) == 75
    stopped = max(losses_of(run))
    assert stopped < 40
    assert interrupt(recipe, run, signal.SIGINT, processes=1, at_step=stopped + 4) == 75
    done = penstock("train", recipe, "--processes", 3)
    assert done.returncode == 0, done.stderr
    assert f"Step {max(losses_of(run))} of " in done.stderr

    audit = run_cli("data", "audit", run, "--json")
    result = json.loads(audit.stdout)
    assert (audit.returncode, audit.stderr) == (0, "")
    assert result["steps"] == 40
    assert result["samples"] == 480
    assert result["ranks"] == [2, 1, 3]
    assert not result["faults"]

    whole = tmp_path / "whole"
    assert penstock("train", recipe, "--set", f"run.dir={whole}").returncode == 0
    assert sorted(losses_of(run)) == sorted(losses_of(whole)) == list(range(1, 41))
    for step, (loss, _) in losses_of(whole).items():
        assert losses_of(run)[step][0] == pytest.approx(loss, abs=1e-4), step


def test_a_killed_run_resumes_from_its_last_checkpoint_bit_for_bit(recipe, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for at_step in (3, 14, 25):  # before the first checkpoint, and between two
        assert interrupt(recipe, killed, signal.SIGKILL, processes=2, at_step=at_step) == -signal.SIGKILL
    for run in (killed, whole):
        done = penstock("train", recipe, "--set", f"run.dir={run}", "--processes", 2)
        assert done.returncode == 0, done.stderr
    assert losses_of(killed) == losses_of(whole), "every digit of every step"
    assert run_cli("data", "audit", killed).returncode == 0


def test_a_run_killed_while_it_saves_keeps_the_last_complete_checkpoint(recipe, tmp_path):
    run, words = tmp_path / "run", ["--set", "checkpoint.every=1", "--set", "schedule.rule=constant"]
    for _ in range(3):
        with Command(
            "train", recipe, *words, "--set", "run.steps=4000", stderr=subprocess.DEVNULL
        ) as process:
            before = len(list((run / "checkpoints").glob("step-*")))
            while process.poll() is None:
                saving = list((run / "checkpoints").glob(".step-*.tmp"))
                if saving and (before or list((run / "checkpoints").glob("step-*"))):
                    process.kill()
        assert process.returncode == -signal.SIGKILL
        for folder in (run / "checkpoints").glob("step-*"):
            assert (folder / "checkpoint.json").is_file(), "a folder with its final name is complete"
    words += ["--set", f"run.steps={max(losses_of(run)) + 2}"]
    assert penstock("train", recipe, *words).returncode == 0
    whole = tmp_path / "whole"
    assert penstock("train", recipe, *words, "--set", f"run.dir={whole}").returncode == 0
    assert losses_of(run) == losses_of(whole), "every digit of every step"
    assert run_cli("data", "audit", run).returncode == 0
    assert not list((run / "checkpoints").glob(".*")), "what a killed writer left is gone"


def handles(pid, number):
    """True if a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"^SigCgt:\s*(\w+)", status, re.M)[1], 16) >> (number - 1) & 1)


def test_a_stop_that_arrives_before_processes_start_ends_the_command(recipe, tmp_path):
    words = ["train", str(recipe), "--set", "run.steps=100000", "--processes", "2"]
    with Command(*words, interpreter=SIGNALS, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not handles(process.pid, signal.SIGTERM):
            time.sleep(0.01)
        process.terminate()  # now: its ranks are still to be started
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 75, said
    assert STOPPED_EARLY in said
    assert not (tmp_path / "run").exists()


def test_a_refused_resume_leaves_the_run_as_it_was(recipe, tmp_path):
    assert penstock("train", recipe, "--set", "run.steps=4").returncode == 0
    before = (tmp_path / "run" / "config.json").read_bytes()
    refused = penstock("train", recipe, "--set", "data.sequence_length=16")
    assert refused.returncode == 1
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert run_cli("data", "audit", tmp_path / "run", cwd="/").returncode == 0


def test_a_batch_size_changed_on_the_way_is_audited_and_supplied_right(recipe, tmp_path):
    settings = ("--set", "data.corpora.python.epochs=1")
    assert penstock("train", recipe, *settings, "--set", "run.steps=6").returncode == 0
    smaller = (*settings, "--set", "data.global_batch_size=4")
    assert penstock("train", recipe, *smaller, "--set", "run.steps=12", "--processes", 2).returncode == 0
    audit = json.loads(run_cli("data", "audit", tmp_path / "run", "--json").stdout)
    assert audit["samples"] == 6 * 12 + 6 * 4
    assert not audit["faults"]


def test_the_audit_finds_a_lost_a_repeated_and_an_altered_sample(recipe, tmp_path):
    run = tmp_path / "run"
    assert penstock("train", recipe, "--set", "run.steps=10").returncode == 0
    path = run / "samples" / "rank-00000.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["sample_ids"].pop()
    records[1]["crc32"].pop()
    records[3]["sample_ids"][0] = records[3]["sample_ids"][1]
    records[5]["crc32"][2] ^= 1
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    audit = run_cli("data", "audit", run)
    assert audit.returncode == 1
    assert "step 2: missing" in audit.stdout
    assert "step 4: missing" in audit.stdout
    assert "repeated" in audit.stdout
    assert "step 6: changed" in audit.stdout


def test_a_finished_run_says_so_and_can_be_extended(recipe):
    assert penstock("train", recipe, "--set", "run.steps=10").returncode == 0
    again = penstock("train", recipe, "--set", "run.steps=10")
    assert again.returncode == 0
    assert "Finished: 10 steps are done" in again.stderr
    longer = penstock("train", recipe, "--set", "run.steps=12")
    assert longer.returncode == 0
    assert "Resumed after step 10" in longer.stderr


def test_an_edited_recipe_takes_effect_at_a_resume_and_leaves_an_event(recipe, tmp_path):
    assert penstock("train", recipe, "--set", "run.steps=4").returncode == 0
    edited = penstock("train", recipe, "--set", "run.steps=6", "--set", "data.global_batch_size=24")
    assert edited.returncode == 0, edited.stderr
    assert "At step 4, global_batch_size is given as 24 and was saved as 12: applied." in edited.stderr
    [event] = [record for record in records_of(tmp_path / "run") if record.get("event") == "resume_change"]
    assert (event["step"], event["saved"], event["told"], event["applied"]) == (4, 12, 24, True)
    assert run_cli("data", "audit", tmp_path / "run").returncode == 0


@pytest.mark.parametrize(
    ("before", "after", "rises"),
    [
        ({}, {"run.steps": 24}, True),  # the last step's rate was a tenth of the peak
        ({}, {"run.steps": 9}, False),
        ({"schedule.rule": "constant"}, {"run.steps": 24}, False),
        ({"schedule.rule": "wsd", "schedule.decay_steps": 4}, {"run.steps": 24}, True),
        ({}, {"run.steps": 24, "schedule.rule": "constant", "optim.learning_rate": 0.001}, False),
    ],
)
def test_a_longer_run_says_that_its_learning_rate_rises(recipe, before, after, rises):
    def words(settings):
        return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]

    assert penstock("train", recipe, *words({"run.steps": 8, **before})).returncode == 0
    longer = penstock("train", recipe, *words({**before, **after}))
    assert longer.returncode == 0, longer.stderr
    assert ("The learning rate of step 9 rises from " in longer.stderr) is rises, longer.stderr


def test_a_dry_run_prints_the_recipe_and_what_follows_from_it(recipe, tmp_path):
    done = run_cli("train", recipe, "--dry-run", "--json", "--processes", 3)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["recipe"]["model"]["vocab_size"] == 400
    assert plan["derived"]["rows per rank and step"] == 4
    assert plan["derived"]["tokens in the run"] == 40 * 12 * 32
    assert not (tmp_path / "run").exists()


def test_ranks_that_work_on_the_same_rows_log_them_once(recipe):
    layout = ("--processes", 4, "--set", "parallel.tensor=2", "--set", "parallel.context=2")
    done = penstock("train", recipe, "--set", "run.steps=4", *layout)
    assert done.returncode == 0, done.stderr
    audited = run_cli("data", "audit", recipe.parent / "run")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert "48 samples" in audited.stdout


def test_an_edited_learning_rate_is_visible_in_log_report_and_a_kept_recipe(recipe, tmp_path):
    run = tmp_path / "run"
    assert penstock("train", recipe, "--set", "run.steps=8").returncode == 0
    edited = ("--set", "run.steps=16", "--set", "optim.learning_rate=0.002", "--set", "data.holdout=0.1")
    again = penstock("train", recipe, *edited)
    assert again.returncode == 0, again.stderr
    assert "This start changes optim.learning_rate from 0.01 to 0.002." in again.stderr
    assert "data.holdout" not in again.stderr, "told anew, and the same"
    starts = [record for record in records_of(run) if record.get("event") == "start"]
    assert [start["changes"] for start in starts] == [
        {},
        {"run.steps": [8, 16], "optim.learning_rate": [0.01, 0.002]},
    ]
    kept = [json.loads((run / start["recipe"]).read_text()) for start in starts]
    assert [each["optim"]["learning_rate"] for each in kept] == [0.01, 0.002]
    assert kept[1] == json.loads((run / "config.json").read_text())
    assert run_cli("report", run).returncode == 0
    page = (run / "report.html").read_text()
    assert "run.steps 8 → 16; optim.learning_rate 0.01 → 0.002" in page


def test_a_run_that_is_finished_already_keeps_its_recipe(recipe, tmp_path):
    assert penstock("train", recipe, "--set", "run.steps=6").returncode == 0
    before = (tmp_path / "run" / "config.json").read_bytes()
    again = penstock("train", recipe, "--set", "run.steps=6", "--set", "optim.learning_rate=0.5")
    assert again.returncode == 0
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert len(list((tmp_path / "run" / "starts").iterdir())) == 1

"""Discovery of runs, and their rows in the table."""

import fcntl
import json
import os

import pytest

from penstock.core import clock
from penstock.core.files import write_json
from penstock.obs.run_data.discover import RunFolders, UnknownRun
from penstock.obs.run_data.run_row import Summaries


def make(folder, *, steps=10, last=4, recipe=True):
    folder.mkdir(parents=True)
    records = [{"event": "start", "step": 0, "ranks": 2, "time": "2026-01-01T00:00:00+00:00"}]
    records += [{"step": n, "loss": 5.0 - n, "step_s": 2.0, "mfu": 0.5} for n in range(1, last + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if recipe:
        (folder / "config.json").write_text(json.dumps({"run": {"steps": steps}}))
    return folder


def row_of(folder):
    (run,) = RunFolders([folder]).runs()
    return Summaries().row(run)


def test_runs_are_found_below_folders_each_once_and_named_apart(tmp_path):
    make(tmp_path / "a" / "base")
    make(tmp_path / "b" / "base")
    (tmp_path / "b" / "notes").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    found = RunFolders([tmp_path, tmp_path / "a" / "base"]).runs()
    assert [run.name for run in found] == ["a/base", "b/base"]
    apart = RunFolders([tmp_path / "a" / "base", tmp_path / "b" / "base"]).runs()
    assert [run.name for run in apart] == [str(tmp_path / "a" / "base"), str(tmp_path / "b" / "base")]
    with pytest.raises(UnknownRun, match="no such run"):
        RunFolders([tmp_path]).run("../../etc")


def test_a_row_is_of_the_last_step_and_tells_what_is_left(tmp_path):
    folder = make(tmp_path / "run")
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        row = row_of(folder)
    assert (row["state"], row["step"], row["steps"], row["loss"]) == ("training", 4, 10, 1.0)
    assert (row["eta_s"], row["ranks"], row["mfu"]) == (12.0, 2, 0.5)
    assert (row["tokens"], row["cost"]) == (None, None)


def test_the_end_of_a_run_is_told_from_its_folder(tmp_path):
    assert row_of(make(tmp_path / "finished", last=10))["state"] == "finished"
    killed = row_of(make(tmp_path / "killed"))
    assert killed["state"] == "failed"
    assert killed["error"] == "it ended after step 4 without a checkpoint of it"
    stopped = make(tmp_path / "stopped")
    (stopped / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert row_of(stopped)["state"] == "stopped"
    hung = make(tmp_path / "hung")
    with (hung / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(hung / "metrics.jsonl", (0, clock.unix_seconds() - 3600))
        assert row_of(hung)["state"] == "stalled"


def test_a_run_whose_job_has_recorded_nothing_yet_starts_unless_it_hung(tmp_path):
    folder = tmp_path / "run"
    (folder / "starts").mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = row_of(folder)
        (folder / "hangs").mkdir()
        write_json(folder / "hangs" / "rank-00000.json", {})
        hung = row_of(folder)
    assert (started["state"], started["error"]) == ("training", None)
    assert (hung["state"], hung["error"]) == ("stalled", "it hung: see hangs/")
    assert row_of(folder)["state"] == "stopped"


@pytest.mark.parametrize(("hung_s_after", "is_hung"), [(60, True), (-60, False)])
def test_a_run_is_told_to_have_hung_only_if_it_recorded_nothing_since(tmp_path, hung_s_after, is_hung):
    folder = make(tmp_path / "run")
    at = clock.unix_seconds() - 3600
    os.utime(folder / "metrics.jsonl", (at, at))
    (folder / "hangs").mkdir()
    for rank, hung_at in enumerate((at - 86_400, at + hung_s_after)):
        path = folder / "hangs" / f"rank-{rank:05d}.json"
        path.write_text("{}")
        os.utime(path, (hung_at, hung_at))
    killed = row_of(folder)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = row_of(folder)
    assert (killed["state"], held["state"]) == ("failed", "stalled")
    assert [row["error"].startswith("it hung") for row in (killed, held)] == [is_hung, is_hung]


def test_a_hang_is_told_though_an_earlier_look_knew_the_folder_of_hangs(tmp_path):
    folder, summaries = make(tmp_path / "run"), Summaries()
    (run,) = RunFolders([folder]).runs()
    (folder / "hangs").mkdir()
    write_json(folder / "hangs" / "rank-00000.json", {})
    recorded_s = clock.unix_seconds() + 60
    os.utime(folder / "metrics.jsonl", (recorded_s, recorded_s))
    assert not summaries.row(run)["error"].startswith("it hung")
    write_json(folder / "hangs" / "rank-00001.json", {})
    os.utime(folder / "hangs" / "rank-00001.json", (recorded_s + 60, recorded_s + 60))
    assert summaries.row(run)["error"].startswith("it hung")


def test_a_long_file_is_read_at_its_ends_only(tmp_path):
    folder = make(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.seek(8 << 30, os.SEEK_CUR)
        file.write(
            b'\n{"step": 7, "loss": 0.5}\n{"event": "samples", "step": 7, "x": "'
            + b"y" * 40_000
            + b'"}\n{"st'
        )
    row = row_of(folder)
    assert (row["step"], row["loss"], row["started"]) == (7, 0.5, "2026-01-01T00:00:00+00:00")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{", b"null\n", b'{"step": 1}\n', b"\xff\n" * 9, b'{"event": 1, "step": 2}\n']
)
def test_a_run_without_a_step_has_a_row(tmp_path, content):
    folder = make(tmp_path / "run", recipe=False)
    (folder / "metrics.jsonl").write_bytes(content)
    (folder / "config.json").write_bytes(content)
    row = row_of(folder)
    assert (row["state"], row["step"], row["loss"]) == ("stopped", None, None)


def test_a_recipe_that_was_away_for_a_moment_is_read_again_though_it_has_not_changed(tmp_path):
    folder = make(tmp_path / "run")
    (run,) = RunFolders([folder]).runs()
    summaries = Summaries()
    assert summaries.row(run)["steps"] == 10
    (folder / "config.json").rename(folder / "away")
    assert summaries.row(run)["steps"] is None
    (folder / "away").rename(folder / "config.json")
    assert summaries.row(run)["steps"] == 10


def test_a_run_costs_its_device_hours_at_the_price_of_its_recipe_or_of_the_console(tmp_path):
    folder = make(tmp_path / "run")
    (run,) = RunFolders([folder]).runs()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0, "device_hours": 3.5}\n')
    assert (Summaries().row(run)["device_hours"], Summaries().row(run)["cost"]) == (3.5, None)
    assert Summaries(price=2.0).row(run)["cost"] == 7.0
    (folder / "config.json").write_text(json.dumps({"run": {"steps": 9, "device_hour_price": 4.0}}))
    assert Summaries(price=2.0).row(run)["cost"] == 14.0


@pytest.mark.parametrize("away_s", [-86_400, 86_400])
def test_a_clock_that_jumped_makes_no_run_look_alive(tmp_path, away_s):
    folder = make(tmp_path / "run")
    at = clock.unix_seconds() + away_s
    os.utime(folder / "metrics.jsonl", (at, at))
    assert row_of(folder)["state"] == "failed"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert row_of(folder)["state"] == "stalled"

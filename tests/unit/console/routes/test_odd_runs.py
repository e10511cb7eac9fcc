"""Runs as nobody means them: names that are no UTF-8, numbers that no JSON has, folders that are no run."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState
from tests.console_workers import answer_here

PREVIOUS = Path(__file__).parents[3] / "golden" / "previous" / "run"
"""A run that commit 0d03ec3 wrote (tests/e2e/test_previous_version.py)."""
NAME = b"caf\xe9"  # Latin-1


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A client of a console over the folder `runs`."""
    answer_here(monkeypatch)
    (tmp_path / "runs").mkdir()
    state = ConsoleState([tmp_path / "runs"], ConsoleAccess())
    with TestClient(build_app(state), base_url="http://127.0.0.1:8400") as client:
        yield client
    state.close()


def write(folder, *records, recipe=None):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(
        json.dumps({"run": {"steps": 2, "dir": str(folder)}} if recipe is None else recipe)
    )


START = {"event": "start", "step": 0, "ranks": 1, "time": "2026-01-01T00:00:00+00:00"}
STEPS = [{"step": n, "loss": 4.0 - n} for n in (1, 2)]


def test_a_folder_whose_name_is_no_utf_8_is_shown_escaped_and_opens(asked, tmp_path):
    for parent in ("a", "b"):  # one name: told apart by their whole path
        write(tmp_path / "runs" / parent / os.fsdecode(NAME), START, *STEPS)
    rows = asked.get("/api/runs").json()["runs"]
    assert [row["name"] for row in rows] == ["a/caf\\xe9", "b/caf\\xe9"]
    assert rows[0]["path"].endswith("runs/a/caf\\xe9")
    run = f"/api/runs/{rows[0]['id']}"
    assert asked.get(f"{run}/curves?metrics=loss").json()["series"]["loss"] == [3, 2]
    assert asked.get(run).json()["recipe"]["run.dir"].endswith("caf\\udce9")
    with_other = asked.get(f"{run}/compare", params={"with": rows[1]["id"]})
    assert with_other.status_code == 200


def test_numbers_that_no_json_has_are_null(asked, tmp_path):
    start = {
        "event": "start",
        "step": 0,
        "ranks": math.nan,
        "peak_flops": math.inf,
        "changes": {"a": [1, math.nan]},
    }
    write(tmp_path / "runs" / "first", start, {"step": 1, "loss": math.nan, "mfu": -math.inf}, STEPS[1])
    (row,) = asked.get("/api/runs").json()["runs"]
    found = asked.get(f"/api/runs/{row['id']}")
    assert found.status_code == 200
    (starts,) = json.loads(found.text, parse_constant=pytest.fail)["summary"]["tables"]
    assert starts["rows"] == [["0", "\u2013", "\u2013", "2", "\u2013", "\u2013", "a 1 \u2192 nan"]]
    curves = asked.get(f"/api/runs/{row['id']}/curves?metrics=loss,mfu").json()
    assert curves["series"] == {"loss": [None, 2], "mfu": [None, None]}


def test_a_text_with_half_of_a_pair_is_shown_escaped(asked, tmp_path):
    answers = [{"prompt": "caf\udce9", "answer": "\ud800"}]
    write(tmp_path / "runs" / "first", *STEPS, {"event": "samples", "step": 2, "answers": answers})
    (row,) = asked.get("/api/runs").json()["runs"]
    (prompt,) = asked.get(f"/api/runs/{row['id']}/answers").json()["prompts"]
    assert (prompt["prompt"], prompt["answers"][0]["answer"]) == ("caf\\udce9", "\\ud800")


def test_a_run_of_an_older_version_opens_in_every_view_that_needs_no_model(asked, tmp_path):
    shutil.copytree(PREVIOUS, tmp_path / "runs" / "old")
    (row,) = asked.get("/api/runs").json()["runs"]
    assert (row["name"], row["step"], row["state"]) == ("old", 3, "finished")
    run = f"/api/runs/{row['id']}"
    opened = asked.get(run).json()
    assert (opened["damaged_lines"], [event["kind"] for event in opened["events"]]) == (0, ["start"])
    loss = asked.get(f"{run}/curves?metrics=loss&x=tokens").json()
    assert len(loss["series"]["loss"]) == 3
    assert None not in loss["x"]
    assert asked.get(f"{run}/ranks").json()["steps"] == []
    assert asked.get(f"{run}/answers").json() == {"steps": [], "prompts": []}
    assert asked.get(f"{run}/checkpoints").json()["steps"] == [3]


def test_a_folder_that_is_no_run_is_not_among_the_runs(asked, tmp_path):
    runs = tmp_path / "runs"
    (runs / "notes").mkdir()
    (runs / "notes" / "readme.txt").write_text("no run")
    (runs / "metrics.jsonl-old").write_text("{}")
    (runs / "linked").symlink_to(runs)
    assert asked.get("/api/runs").json() == {"runs": []}
    for path in ("", "/curves?metrics=loss", "/ranks", "/checkpoints", "/answers"):
        answer = asked.get(f"/api/runs/0123456789abcdef{path}")
        assert (answer.status_code, "There is no such run" in answer.json()["error"]) == (404, True), path


def test_a_folder_whose_files_are_no_records_is_shown_without_a_step(asked, tmp_path):
    (tmp_path / "runs" / "text").mkdir()
    (tmp_path / "runs" / "text" / "metrics.jsonl").write_bytes(b"\x00\xff\nhello\n[]\n")
    (tmp_path / "runs" / "text" / "config.json").write_text("[1")
    (tmp_path / "runs" / "folder" / "metrics.jsonl").mkdir(parents=True)
    rows = asked.get("/api/runs").json()["runs"]
    assert [(row["name"], row["step"], row["state"]) for row in rows] == [("text", None, "stopped")]
    run = f"/api/runs/{rows[0]['id']}"
    opened = asked.get(run).json()
    assert (opened["damaged_lines"], opened["metrics"], opened["recipe"]) == (3, [], {})
    assert asked.get(f"{run}/curves?metrics=loss").json()["x"] == []


def test_a_reply_that_nobody_numbered_is_passed_over(asked, tmp_path):
    write(tmp_path / "runs" / "odd", START, *STEPS)
    (tmp_path / "runs" / "odd" / "control").mkdir()
    (tmp_path / "runs" / "odd" / "control" / "answer-x.json").write_text("{}")
    (run,) = asked.get("/api/runs").json()["runs"]
    assert asked.get(f"/api/runs/{run['id']}/requests").json() == {"requests": [], "running": False}

"""Requests to jobs: sent or refused as on the command line, also where files cannot be written."""

import fcntl
import json
import shutil
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState
from penstock.testing.corpora import write_corpus
from penstock.train.control import send
from penstock.train.control.requests import read_request
from penstock.train.inspect import run_questions
from tests.console_workers import fork_workers
from tests.unit.train.inspect.test_recent_run import write_recipe

ORIGIN = "http://127.0.0.1:8400"


@pytest.fixture
def run(tmp_path):
    for name in ("web", "code"):
        write_corpus(tmp_path / name, [[1 + i % 9] * 20 for i in range(60)], vocab_size=10)
    (tmp_path / "run").mkdir()
    write_recipe(tmp_path / "run", steps=30)
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n")
    return tmp_path / "run"


@pytest.fixture
def client(run, monkeypatch):
    fork_workers(monkeypatch)
    state = ConsoleState([run], ConsoleAccess(control=True))
    with TestClient(build_app(state), base_url=ORIGIN) as found:
        (row,) = found.get("/api/runs").json()["runs"]
        found.base_url = f"{ORIGIN}/api/runs/{row['id']}/"
        yield found
    state.close()


def ask(client, **request):
    return client.post("requests", json=request, headers={"origin": ORIGIN})


@contextmanager
def job(run):
    """Hold a run as a job does."""
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_only_what_is_checked_against_the_corpora_needs_them(client, run):
    for name in ("web", "code"):
        shutil.rmtree(run.parent / name)
    with job(run):
        for fields in ({"stop": True}, {"checkpoint": True}, {"batch_size": 8}, {"islands": 2}):
            sent = ask(client, **fields)
            assert (sent.status_code, sent.json()["running"]) == (200, True), fields
            assert read_request(run, sent.json()["number"]).asked_by == "console"
        for fields in ({"weights": {"web": 0.5}}, {"skip_steps": [8, 10]}):
            assert ask(client, **fields).status_code == 400, fields


def test_a_stop_is_sent_to_a_job_that_starts_while_its_run_is_marked(run, monkeypatch):
    asked = {"asked": {"stop": True}, "asked_by": "console"}
    monkeypatch.setattr(send, "stop_between_starts", lambda _: "It ends before its next start")
    assert run_questions.request(run, **asked) == {"said": "It ends before its next start"}
    with job(run):
        held = iter((False, True, True, True))
        monkeypatch.setattr(send, "job_is_running", lambda _: next(held))
        assert run_questions.request(run, **asked)["running"]


def test_what_needs_a_job_is_refused_where_none_runs(client, run):
    refused = ask(client, checkpoint=True)
    assert (refused.status_code, refused.json()["error"]) == (
        409,
        f"No job runs on {run.name}. A run that was stopped has its checkpoints.",
    )


def test_a_folder_that_cannot_be_written_is_a_sentence(client, run):
    (run / "control").write_text("a file")
    refused = ask(client, batch_size=8)
    assert refused.status_code == 500
    assert refused.json()["error"].startswith("A file cannot be read or written: ")
    assert str(run / "control") in refused.json()["error"]

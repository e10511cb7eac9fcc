"""Requests to jobs: sent or refused as on the command line, also where files cannot be written."""

import fcntl
import json
import shutil
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.routes import control
from penstock.console.state import ConsoleState
from penstock.testing.corpora import write_corpus
from penstock.train.control.requests import read_request
from tests.unit.console.runs.test_opened import write_recipe

ORIGIN = "http://127.0.0.1:8400"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for name in ("web", "code"):
        write_corpus(tmp_path / name, [[1 + i % 9] * 20 for i in range(60)], vocab_size=10)
    (tmp_path / "run").mkdir()
    write_recipe(tmp_path / "run", steps=30)
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n")
    return tmp_path / "run"


@pytest.fixture
def client(run):
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
        for kind, fields in (
            ("stop", {}),
            ("checkpoint", {}),
            ("batch", {"batch": 8}),
            ("islands", {"islands": 2}),
        ):
            sent = ask(client, kind=kind, **fields)
            assert (sent.status_code, sent.json()["running"]) == (200, True), kind
            assert read_request(run, sent.json()["number"]).asked_by == "console"
        for kind, fields in (("mixture", {"weights": {"web": 0.5}}), ("skip", {"from": 8, "to": 9})):
            assert ask(client, kind=kind, **fields).status_code == 400, kind


def test_a_stop_is_sent_to_a_job_that_starts_while_its_run_is_marked(client, run, monkeypatch):
    monkeypatch.setattr(control, "stop_between_starts", lambda _: "It ends before its next start")
    assert ask(client, kind="stop").json() == {"said": "It ends before its next start"}
    with job(run):
        held = iter((False, True, True, True))
        monkeypatch.setattr(control, "job_is_running", lambda _: next(held))
        assert ask(client, kind="stop").json()["running"]


def test_a_folder_that_cannot_be_written_is_a_sentence(client, run):
    (run / "control").write_text("a file")
    refused = ask(client, kind="batch", batch=8)
    assert refused.status_code == 500
    assert refused.json()["error"].startswith("A file cannot be read or written: ")
    assert str(run / "control") in refused.json()["error"]


def test_a_cache_folder_that_cannot_be_made_is_a_sentence(client, run, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(run / "metrics.jsonl"))
    for path in (str(client.base_url).rstrip("/"), "curves?metrics=loss", "ranks"):
        refused = client.get(path)
        assert (refused.status_code, "set PENSTOCK_CACHE" in refused.json()["error"]) == (400, True), path

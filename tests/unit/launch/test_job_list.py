"""What `penstock launch list` shows: known folders joined with what engines list."""

import json
import shutil

import pytest

from penstock.core.errors import PenstockError
from penstock.launch import job_list
from penstock.launch.engines import slurm
from penstock.launch.engines.engine import JobState, QueuedJob
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.job_list import list_jobs
from penstock.launch.known_runs import known_runs
from tests.in_process import run_cli
from tests.unit.launch.test_spec import make_spec


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def launched(run, engine, ident, *, host="", at="2026-01-01"):
    folder = JobFolder(run)
    folder.make()
    folder.write_spec(make_spec(run_dir=str(run)))
    folder.write_job(Job(engine=engine, ident=ident, host=host, submitted_at=at))
    return folder


class Engine:
    """An engine that lists some jobs, and counts how often it is asked."""

    def __init__(self, *runs, error=None, **jobs):
        self.listed = {ident.removeprefix("_"): QueuedJob(state=state) for ident, state in jobs.items()}
        self.listed |= {ident: QueuedJob(state=RUNNING, run=run) for ident, run in runs}
        self.error, self.hosts = error, []

    def jobs(self, host, _known):
        self.hosts.append(host)
        if self.error:
            raise self.error
        return self.listed


RUNNING = JobState(is_live=True, status="RUNNING", reason="on n[0-1]")


@pytest.fixture
def engines(monkeypatch):
    found = {}
    monkeypatch.setattr(job_list, "ENGINES", found)
    return found


def test_a_run_that_was_launched_is_known_until_its_folder_is_removed(tmp_path, state):
    runs = tmp_path / "all"
    for name in ("a", "b"):
        launched(runs / name, "slurm", "7")
        launched(runs / name, "slurm", "8")
    assert sorted(known_runs()) == [runs / "a", runs / "b"]
    shutil.rmtree(runs / "a")
    assert known_runs() == [runs / "b"]
    assert len(list((state / "penstock" / "runs").iterdir())) == 1
    runs.rename(tmp_path / "unmounted")
    assert known_runs() == []
    (tmp_path / "unmounted").rename(runs)
    assert known_runs() == [runs / "b"], "a file system that was away keeps its runs"


def test_an_entry_that_is_no_link_or_cannot_be_followed_hides_no_other_run(tmp_path, state):
    launched(tmp_path / "run", "slurm", "7")
    links = state / "penstock" / "runs"
    (links / "stray").write_text("not a link")
    (links / "folder").mkdir()
    (links / "unreadable").symlink_to(tmp_path / ("a" * 300))  # ENAMETOOLONG
    (links / "loop").symlink_to(links / "loop")
    assert known_runs() == [tmp_path / "run"]
    assert {path.name for path in links.iterdir()} >= {"stray", "folder"}


def test_a_home_that_cannot_be_written_stops_no_launch(tmp_path, state):
    state.write_text("not a folder")
    launched(tmp_path / "run", "slurm", "7")
    assert known_runs() == []


def test_each_engine_is_asked_once_and_what_it_no_longer_lists_has_ended(tmp_path, engines):
    engines["slurm"] = Engine(("9", "/elsewhere/run"), _7=RUNNING)
    engines["kubernetes"] = Engine(a=RUNNING, others=RUNNING)
    launched(tmp_path / "seven", "slurm", "7", at="2026-01-02")
    launched(tmp_path / "eight", "slurm", "8", at="2026-01-03").log_event("finish", cause="all saved", code=0)
    launched(tmp_path / "a", "kubernetes", "a", host="here/research", at="2026-01-04")
    launched(tmp_path / "b", "kubernetes", "b", host="here/research")
    jobs = list_jobs([*known_runs(), tmp_path / "seven", tmp_path / "nosuch"], [("slurm", "")])
    assert [(job.run.rpartition("/")[2], job.job, job.status, job.is_live) for job in jobs] == [
        ("a", "a", "RUNNING", True),
        ("seven", "7", "RUNNING", True),
        ("run", "9", "RUNNING", True),
        ("eight", "8", "ENDED", False),
        ("b", "b", "ENDED", False),
    ]
    assert (jobs[3].reason, jobs[1].nodes) == ("all saved", "2")
    assert (engines["slurm"].hosts, engines["kubernetes"].hosts) == ([""], ["here/research"])


def test_jobs_of_others_in_a_namespace_are_listed_when_it_is_named(tmp_path, engines):
    engines["kubernetes"] = Engine(a=RUNNING, others=RUNNING)
    launched(tmp_path / "a", "kubernetes", "a", host="here/research")
    named = list_jobs(known_runs(), [("kubernetes", "/research")])
    assert [(job.job, bool(job.run)) for job in named] == [("a", True), ("others", False)]


def test_an_engine_that_does_not_answer_and_a_damaged_folder_hide_no_other_job(tmp_path, engines):
    engines["slurm"] = Engine(error=PenstockError("squeue cannot reach Slurm: refused", fix="Try again."))
    engines["kubernetes"] = Engine(a=RUNNING)
    launched(tmp_path / "s", "slurm", "7", at="2026-01-02")
    launched(tmp_path / "k", "kubernetes", "a")
    (launched(tmp_path / "d", "slurm", "8").path / "spec.json").write_text("{")
    jobs = list_jobs(known_runs())
    assert [(job.job, job.status) for job in jobs] == [("a", "RUNNING"), ("7", "UNKNOWN"), ("", "UNKNOWN")]
    assert jobs[1].reason == "squeue cannot reach Slurm: refused"
    assert "is damaged" in jobs[2].reason


def test_a_place_without_known_jobs_that_does_not_answer_is_told_if_it_was_named(engines):
    engines["slurm"] = engines["kubernetes"] = Engine(error=PenstockError("No cluster", fix="Try."))
    jobs = list_jobs([], [("slurm", ""), ("kubernetes", "/research")])
    assert [(job.engine, job.status) for job in jobs] == [("kubernetes", "UNKNOWN")]


def test_slurm_lists_the_jobs_whose_scripts_are_of_penstock(monkeypatch):
    lines = [
        "7|RUNNING|None|N/A|n[0-1]|/my runs/a|b/launch/job.sbatch",
        "8|PENDING|JobHeldUser|N/A||/r/launch/job.sbatch",
        "9|RUNNING|None|N/A|n3|/home/me/train.sh",
        "10|RUNNING|None|N/A|n3|(null)",
    ]
    monkeypatch.setattr(slurm, "run_slurm", lambda *_: "\n".join(lines))
    found = slurm.ENGINE.jobs("")
    assert {ident: (job.run, job.state.status) for ident, job in found.items()} == {
        "7": ("/my runs/a|b", "RUNNING"),
        "8": ("/r", "PENDING"),
    }
    assert (found["8"].state.is_stuck, found["7"].state.reason) == (True, "on n[0-1]")


def test_a_colleagues_job_in_the_queue_has_not_ended(tmp_path, monkeypatch):
    for ident in ("7", "8", "9"):
        launched(tmp_path / ident, "slurm", ident)
    asked = []

    def squeue(*words):
        asked.append(words[1:-1])
        ident = "7" if "--me" in words else "8"
        return f"{ident}|RUNNING|None|N/A|n[0-1]|{tmp_path}/{ident}/launch/job.sbatch\n"

    monkeypatch.setattr(slurm, "run_slurm", squeue)
    monkeypatch.setattr(slurm, "query_job", squeue)
    jobs = sorted(list_jobs(known_runs()), key=lambda job: job.job)
    assert [(job.job, job.status) for job in jobs] == [("7", "RUNNING"), ("8", "RUNNING"), ("9", "ENDED")]
    assert asked == [("--me", "--noheader"), ("--noheader", "--jobs=8,9")]


@pytest.mark.parametrize("step", ['"x"', "true", "1.5", "[1]", "null"])
def test_a_metrics_record_or_a_transition_of_another_form_does_not_end_the_list(tmp_path, monkeypatch, step):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    folder = launched(tmp_path / "run", "local", "123", host="here")
    (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"loss": 1, "tokens_per_s": 2, "step": {step}}}\n')
    (folder.path / "events.jsonl").write_text('{"a": 1}\n' + "[" * 20_000 + "\n")
    folder.log_event("finish", cause="all saved", code=0)
    done = run_cli("launch", "list")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[1:6] == ["local", "123", "ENDED", "2", "-"]
    assert done.stdout.endswith("all saved\n")


def test_the_list_is_a_table_or_json_of_known_runs_and_of_those_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    mine = launched(tmp_path / "mine", "local", "123", host="here", at="2026-01-02")
    (tmp_path / "mine" / "metrics.jsonl").write_text('{"step": 1200, "loss": 1.5, "tokens_per_s": 9.0}\n')
    mine.log_event("finish", cause="all ranks finished", code=0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another's"))
    launched(tmp_path / "shared" / "team" / "other", "local", "124", host="here")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = run_cli("launch", "list")
    assert done.returncode == 0, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split() == ["run", "engine", "job", "status", "nodes", "step", "submitted", "reason"]
    assert row.split(maxsplit=7) == [
        *(str(tmp_path / "mine"), "local", "123", "ENDED", "2", "1,200", "2026-01-02", "all ranks finished")
    ]
    found = json.loads(run_cli("launch", "list", tmp_path, "--json").stdout)  # with the links below it
    assert [(job["job"], job["step"]) for job in found] == [("123", 1200), ("124", None)]
    assert run_cli("launch", "list", "--live").stdout.startswith("no jobs")
    nosuch = run_cli("launch", "list", tmp_path / "nosuch")
    assert (nosuch.returncode, "no such folder to search" in nosuch.stderr) == (2, True)

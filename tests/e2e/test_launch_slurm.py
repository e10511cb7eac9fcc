"""A real Slurm of four nodes: a submitted run survives what a cluster does to jobs."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.in_process import run_cli
from tests.launched import (
    events_of,
    newest_step,
    starts_of,
    trained_step,
    wait_until,
    write_recipe,
)
from tests.slurm_cluster import slurm_cluster, why_absent
from tests.warm import penstock

pytestmark = pytest.mark.skipif(bool(why_absent()), reason=why_absent() or "there is a Slurm")


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))  # sockets need a short path
    try:
        with slurm_cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(cluster):
    """The cluster, idle and whole, whatever the test before left of it."""
    cluster.mend()
    return cluster


@pytest.fixture(autouse=True)
def leaves_no_process(slurm, leaves_no_process):
    """Look once the cluster is whole: a daemon for one that a test killed is not left by the next test."""


@pytest.fixture
def launch(slurm):
    def run(*words):
        return penstock("launch", *words, env=slurm.environment | {"OMP_NUM_THREADS": "1"})

    return run


def status(launch, run, *, code=0):
    found = launch("status", run, "--json")
    assert found.returncode == code, found.stderr
    return json.loads(found.stdout)


@pytest.mark.timeout(900)
def test_an_elastic_job_goes_on_without_a_lost_node_and_is_resized(slurm, launch, corpus, tmp_path):
    run = tmp_path / "elastic"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=100_000, every=5)
    words = ("--nodes", "1:3", "--partition", "low", "--grace", 40, "--doctor", "skip")
    done = launch("slurm", recipe, *words)
    assert done.returncode == 0, done.stderr

    def trains_on(nodes, *, since):
        wait_until(lambda: starts_of(run)[since:] and starts_of(run)[-1][1] == nodes, f"{nodes} nodes")
        origin = starts_of(run)[-1][0]
        wait_until(lambda: trained_step(run) > origin + 2, f"steps on {nodes} nodes")

    trains_on(3, since=0)
    job = status(launch, run)["job"]
    first, names = slurm.run("squeue", "-h", "-j", job, "-o", "%B %N").stdout.split()
    seen = len(starts_of(run))
    slurm.kill_node(
        next(n for n in slurm.run("scontrol", "show", "hostnames", names).stdout.split() if n != first)
    )
    trains_on(2, since=seen)
    assert status(launch, run)["job"] == job, "the same job all the time"
    for nodes, size in (("1:3", 3), ("1:2", 2)):
        reached, seen = trained_step(run), len(starts_of(run))
        resized = launch("resize", run, nodes)
        assert resized.returncode == 0, resized.stderr
        trains_on(size, since=seen)
        assert starts_of(run)[-1][0] >= reached, "all had saved"
    done = launch("cancel", run)
    assert "stopped after saving" in done.stdout, done.stderr
    wait_until(lambda: slurm.run("squeue", "-h").stdout == "", "the end of the job")
    audit = json.loads(run_cli("data", "audit", run, "--json").stdout)
    assert (audit["samples"], audit["faults"]) == (audit["steps"] * 12, []), "each once, in order"
    assert set(audit["ranks"]) == {2, 3}


def test_a_job_that_waits_for_somebody_says_what_to_do_and_is_cancelled(launch, corpus, tmp_path):
    run = tmp_path / "waits"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=10)
    held = launch("slurm", recipe, "--nodes", 2, "--sbatch=--hold", "--doctor", "skip")
    assert held.returncode == 0, held.stderr
    job = status(launch, run, code=1)["job"]
    reason = f"Slurm's reason: JobHeldUser (it is held): scontrol release {job}"
    assert f"Job {job} will not start by itself. {reason}." in " ".join(held.stderr.split())
    told = launch("status", run)
    assert (told.returncode, f"PENDING, {reason}" in told.stdout) == (1, True), told.stdout
    done = launch("cancel", run)
    assert (done.returncode, "which was PENDING" in done.stdout) == (0, True), done.stderr
    assert not status(launch, run)["is_live"]
    assert launch("cancel", run).returncode == 1


def test_a_request_to_stop_a_job_that_does_not_train_ends_it_before_it_does(slurm, launch, corpus, tmp_path):
    run = tmp_path / "marked"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=10)
    held = launch("slurm", recipe, "--nodes", 2, "--sbatch=--hold", "--doctor", "skip")
    assert held.returncode == 0, held.stderr
    job = status(launch, run, code=1)["job"]
    asked = run_cli("control", run, "--stop", env=slurm.environment)
    assert (asked.returncode, "it ends before its next start" in asked.stdout) == (0, True), asked.stderr
    slurm.run("scontrol", "release", job)
    wait_until(lambda: slurm.run("squeue", "-h").stdout == "", "the end of the job")
    events = [event["event"] for event in events_of(run)]
    assert events == ["submitted", "allocated", "finish"], events_of(run)
    assert status(launch, run)["status"] == "COMPLETED", "it is not put back into the queue"


@pytest.mark.parametrize(
    ("starts", "is_killed"),
    [
        ("trap '' TERM; sleep 4; trap - TERM; exec \"$@\"", False),
        ("[ $SLURMD_NODENAME = n1 ] || { trap '' TERM; sleep 1000; }; exec \"$@\"", True),
    ],
    ids=["both lose the first signal", "n0 hangs and n1 imports torch"],
)
def test_a_job_that_is_told_to_stop_while_it_starts_is_put_back(
    slurm, launch, corpus, tmp_path, starts, is_killed
):
    run = tmp_path / "early"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=100_000)
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f"#!/bin/bash\n{starts}\n")
    wrapper.chmod(0o755)
    words = ("--wrapper", wrapper, "--grace", 8 if is_killed else 45)
    done = launch("slurm", recipe, "--nodes", 2, "--doctor", "skip", *words)
    assert done.returncode == 0, done.stderr
    job = status(launch, run)["job"]
    wait_until(lambda: any(event["event"] == "start" for event in events_of(run)), "the start")
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: any(event["event"] == "finish" for event in events_of(run)), "the end of this start")
    found = {event["event"]: event for event in events_of(run)}
    finish = found["finish"]
    assert (finish["code"], "while stopping for SIGTERM" in finish["cause"]) == (75, True)
    assert ("kill" in found) == is_killed
    wait_until(
        lambda: slurm.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() == "PENDING", "requeue"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", 6, "--partition", "low"), "Partition low has 4 nodes, so the job would wait for ever"),
        (("--nodes", 2, "--partition", "hgih"), "Did you mean 'high'?"),
        (("--nodes", 2, "--partition", "low", "--time-limit", "3h"), "Partition low ends jobs after 1h00m"),
        (("--nodes", 6), "Partition low has 4 nodes"),
        (("--nodes", 3, "--partition", "small"), "Partition small gives a job at most 2 nodes"),
        (("--nodes", 1, "--partition", "closed"), "Partition closed starts no job now (got 'DOWN')"),
        (("--nodes", 2, "--setup", "/dev/full"), "--setup takes a text file of at most"),
        (
            ("--nodes", 2, "--sbatch=--constraint=nosuch"),
            "Batch job submission failed: Invalid feature",
        ),
    ],
)
def test_what_slurm_can_never_give_is_refused_and_nothing_is_left(launch, corpus, tmp_path, words, said):
    run = tmp_path / "refused"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=10)
    done = launch("slurm", recipe, *words)
    assert done.returncode in (1, 2), done.stdout
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not [path for path in run.rglob("*") if path.is_file()], "nothing half submitted"


def test_a_dry_run_asks_slurm_and_submits_nothing(slurm, launch, corpus, tmp_path):
    run = tmp_path / "dry"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=10)
    done = launch("slurm", recipe, "--nodes", 2, "--partition", "low", "--time-limit", "30m", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "sbatch --test-only: sbatch: Job " in done.stdout
    assert "at most 1 device-hours a start (2 nodes x 1 device x 0.5 h)" in done.stdout
    assert "at most 101 starts (--max-requeues 100): 101 device-hours" in done.stdout
    assert "pre-emption leaves 45 s in partition low (GraceTime and KillWait)" in done.stdout
    assert not run.exists()
    default = launch("slurm", recipe, "--nodes", 2, "--partition", "small", "--dry-run", "--json")
    found = json.loads(default.stdout)
    assert found["ceiling"][0] == "at most 1 device-hours a start (2 nodes x 1 device x 0.5 h)"
    assert "the partition ends a start after 30m00s: no --time-limit is given" in found["notes"]
    closed = launch("slurm", recipe, "--nodes", 2, "--partition", "closed", "--dry-run")
    assert (closed.returncode, closed.stdout) == (2, ""), "refused as the submit would be"
    assert slurm.run("squeue", "-h").stdout == ""


def test_a_save_that_takes_longer_than_a_pre_emption_leaves_is_refused(launch, corpus, tmp_path):
    run = tmp_path / "slow"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "step_s": 1.0, "checkpoint_s": 50.0}\n')
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=10)
    words = ("slurm", recipe, "--nodes", 2, "--grace", 120, "--doctor", "skip")
    said = (
        "Partition low leaves a job that it pre-empts too little time for a step of 1.0 s, a save of 50.0 s"
    )
    done = launch(*words)
    assert (done.returncode, said in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert "got '45 s, GraceTime and KillWait'" in " ".join(done.stderr.split())
    assert not (run / "launch").exists()
    shown = launch(*words, "--dry-run")
    assert (shown.returncode, f"note: a submit would be refused: {said}" in shown.stdout) == (0, True)
    assert "pre-emption" not in launch(*words, "--partition", "high", "--dry-run").stdout


def test_the_doctor_examines_the_nodes_before_the_first_start(slurm, launch, corpus, tmp_path):
    """They do so in the wrapper, with what the setup exports, and so does the run."""
    run = tmp_path / "examined"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=2)
    setup, box = tmp_path / "setup.sh", tmp_path / "box"
    setup.write_text("module() { export LOADED=$1; }\nmodule load-cuda\n")
    box.write_text(f'#!/bin/sh\necho "$LOADED $5 $*" >> {tmp_path}/boxed\nshift; exec "$@"\n')
    box.chmod(0o755)
    done = launch("slurm", recipe, "--nodes", 2, "--setup", setup, "--wrapper", f"{box} 'my image'")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: slurm.run("squeue", "-h").stdout == "", "the end of the job")
    files = run / "launch"
    report = (files / "doctor.txt").read_text()
    assert "2 nodes: " in report
    measured = json.loads((files / "doctor.json").read_text())
    assert all(node["host"].startswith("n") for node in measured["nodes"]), report
    assert {(link["source"], link["target"]) for link in measured["links"]} == {(0, 1), (1, 0)}
    assert (files / "exclude.txt").exists()
    assert newest_step(run) == 2, "a red line is reported, and does not end the run"
    boxed = sorted(line.split(" -", 1)[0] for line in (tmp_path / "boxed").read_text().splitlines())
    assert boxed == 2 * ["load-cuda doctor my image python3"] + 2 * ["load-cuda launch my image python3"]


def test_a_job_that_asks_for_sound_nodes_does_not_start_on_others(slurm, launch, corpus, tmp_path):
    run = tmp_path / "unsound"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=2)
    done = launch("slurm", recipe, "--nodes", 2, "--doctor", "require", "--network", "nosuch0")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: slurm.run("squeue", "-h").stdout == "", "the end of the job")
    assert "nosuch0" in (run / "launch" / "doctor.txt").read_text()
    assert [event["event"] for event in events_of(run)] == ["submitted"]
    found = status(launch, run)
    output = run / "launch" / "slurm.out"
    assert (found["status"], f"said why in {output}" in found["reason"]) == ("FAILED", True)
    assert "not started: the run asks for sound nodes (--doctor require)" in output.read_text()

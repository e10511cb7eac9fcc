"""A Slurm job through everything that ends one early: `make soak PART=cluster`."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_launch_slurm import cluster as cluster
from tests.e2e.test_launch_slurm import launch as launch
from tests.e2e.test_launch_slurm import leaves_no_process as leaves_no_process
from tests.e2e.test_launch_slurm import pytestmark as pytestmark
from tests.e2e.test_launch_slurm import slurm as slurm
from tests.e2e.test_launch_slurm import status
from tests.in_process import run_cli
from tests.launched import events_of, frozen, losses_of, newest_step, ranks_of, wait_until, write_recipe
from tests.warm import penstock

STEPS = 60


@pytest.mark.timeout(900)
def test_a_run_survives_preemption_a_lost_node_and_its_time_limit(slurm, launch, corpus, tmp_path):
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.toml", corpus, run=run, steps=STEPS)
    words = ("--nodes", 2, "--partition", "low", "--grace", 40, "--doctor", "skip")
    done = launch("slurm", recipe, *words)
    assert done.returncode == 0, done.stderr
    job = status(launch, run)["job"]

    def state():
        return slurm.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip()

    def await_step_past(step):
        wait_until(lambda: newest_step(run) > step, f"step {step}", alive=lambda: state() != "")

    again = launch("slurm", recipe, *words)
    assert again.returncode == 1
    assert f"is in use by job {job} of slurm" in " ".join(again.stderr.split())

    # Pre-empted: the ranks are told, save at the same step, and the job is back in the queue.
    await_step_past(5)
    seen = len(events_of(run))
    with frozen(ranks_of(run)[1]):
        urgent = slurm.run("sbatch", "--parsable", "-p", "high", "-N", "4", "--wrap", "sleep 1", cwd=tmp_path)
        wait_until(
            lambda: state() != "RUNNING" or stop_of(run, seen) or _is_signalled(ranks_of(run)), "pre-emption"
        )
    wait_until(lambda: any(e["event"] == "finish" for e in events_of(run)[seen:]), "the save")
    assert urgent.returncode == 0, urgent.stderr
    stopped = [e for e in events_of(run)[seen:] if e["event"] == "finish"][-1]
    assert stopped["code"] == 75, stopped
    saved = newest_step(run)
    assert f"checkpoint {saved}" in stopped["cause"], "no step is lost"

    # A node loses its power: Slurm requeues the job, which resumes on others from the newest checkpoint.
    await_step_past(saved)
    (run_nodes,) = {e["cause"].rpartition(" ")[2] for e in events_of(run)[seen:] if e["event"] == "allocated"}
    lost = slurm.run("scontrol", "show", "hostnames", run_nodes).stdout.split()[-1]
    seen = len(events_of(run))
    slurm.kill_node(lost)
    wait_until(lambda: any(e["event"] == "allocated" for e in events_of(run)[seen:]), "the requeue")

    # The time limit comes: USR1 to the script, a save, and the queue again.
    await_step_past(newest_step(run))
    seen = len(events_of(run))
    with frozen(ranks_of(run)[1]):
        elapsed = slurm.run("squeue", "-h", "-j", job, "-o", "%M").stdout.strip().split(":")
        minutes = (60 * int(elapsed[-2]) + int(elapsed[-1]) + 45) // 60 + 1
        changed = slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
        assert changed.returncode == 0, changed.stderr
        wait_until(lambda: stop_of(run, seen), "USR1")
    wait_until(lambda: state() != "RUNNING" or newest_step(run) == STEPS, "the end of this start")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_until(lambda: state() == "", "the end of the job")

    found = status(launch, run)
    assert (found["status"], found["is_live"], found["checkpoint"]) == ("COMPLETED", False, STEPS)
    audit = json.loads(run_cli("data", "audit", run, "--json").stdout)
    assert (audit["steps"], audit["samples"], audit["faults"]) == (STEPS, STEPS * 12, []), (
        "each once, in order"
    )
    assert len(audit["ranks"]) >= 4
    assert set(audit["ranks"]) == {2}
    requeues = [event["requeues"] for event in found["events"] if event["event"] == "allocated"]
    assert requeues[-1] >= 3, found["events"]

    whole = tmp_path / "whole"
    alone = penstock("launch", "local", recipe, "--nodes", 2, "--set", f"run.dir={whole}")
    assert alone.returncode == 0, alone.stderr
    assert losses_of(run) == losses_of(whole), "every digit of every step"


def stop_of(run, after):
    """Return whether the supervisor has asked the ranks to stop, since so many transitions."""
    return any(event["event"] == "stop" for event in events_of(run)[after:])


def _is_signalled(ranks):
    """Return whether a rank has a SIGTERM that it could not handle yet: it stands still."""
    for pid in ranks.values():
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("SigPnd", "ShdPnd")) and int(line.split()[1], 16) >> 14 & 1:
                return True
    return False

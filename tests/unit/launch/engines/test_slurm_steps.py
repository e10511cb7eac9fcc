"""How a step of Slurm is started, and how it ended, from what its nodes reported."""

import math
import os

import pytest

from penstock.core.errors import PeerLost
from penstock.core.signals import StopFlag
from penstock.launch.engines import slurm_steps
from penstock.launch.engines.slurm_steps import ended_of, supervise
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.spec import node_range
from tests.launched import wait_until
from tests.unit.launch.test_spec import make_spec

PATIENCE_S = 30.0
LOST = str(PeerLost("Connection closed by peer"))


def report(node, code, cause=""):
    return {"node": node, "code": code, "cause": cause}


@pytest.mark.parametrize(
    ("reports", "is_elastic", "code", "cause", "lost"),
    [
        ([report(0, 0), report(1, 0)], False, 0, "", False),
        ([report(0, 75), report(1, 75)], False, 75, "", False),
        ([report(0, 75), report(1, 1, "Disk full.")], False, 1, "Disk full.", False),
        ([report(0, 1, LOST), report(1, 3, "Loss is nan.")], False, 3, "Loss is nan.", False),
        ([report(0, 1, LOST)], False, 1, "1 node of 2 (1) did not report an end: lost", True),
        ([], False, 1, "2 nodes of 2 (0, 1) did not report an end: srun ended with 9", True),
        ([report(0, 0)], True, 0, "", False),
        ([report(0, 75), report(1, 75)], True, 75, "", False),
        ([report(0, 76, "No progress.")], True, 76, "No progress.", False),
    ],
)
def test_failures_come_before_stops_and_causes_before_consequences(reports, is_elastic, code, cause, lost):
    ended = ended_of(reports, num_nodes=2, srun_code=9, is_elastic=is_elastic)
    assert (ended.code, ended.cause, ended.lost_node) == (code, cause, lost)


def test_a_step_has_one_task_on_each_node_whatever_the_shell_that_submitted_says(
    command, tmp_path, monkeypatch
):
    command("srun", f'echo "$@ $PENSTOCK_RENDEZVOUS_KEY" > {tmp_path}/asked')
    monkeypatch.setenv("SLURM_NNODES", "3")
    monkeypatch.setenv("SLURM_NTASKS", "6")
    spec, folder = make_spec(nodes=node_range("2:4")), JobFolder(tmp_path)
    folder.make()
    folder.write_spec(spec)
    steps = slurm_steps._Steps(folder, "7", "0", key="k" * 32)
    steps.start(spec, 0)
    assert steps._step.wait(PATIENCE_S) == 0
    assert (tmp_path / "asked").read_text().startswith("--ntasks-per-node=1 --ntasks=3 ")
    assert (tmp_path / "asked").read_text().endswith(f" {'k' * 32}\n"), "in its environment only"
    assert "PENSTOCK_RENDEZVOUS_KEY" not in os.environ


def test_a_step_is_asked_to_stop_again_and_killed_without_its_job(command, tmp_path, monkeypatch):
    command("srun", "exec sleep 1000")
    command("scancel", f'echo "$@" >> {tmp_path}/asked')
    monkeypatch.setattr(slurm_steps, "_STOP_INTERVAL_S", 0.05)
    folder = JobFolder(tmp_path)
    folder.make()
    folder.write_spec(make_spec())

    def asked():
        path = tmp_path / "asked"
        return path.read_text().splitlines() if path.is_file() else []

    steps = slurm_steps._Steps(folder, "7", "0", key="k" * 32)
    steps.start(make_spec(), 0)
    assert steps.poll() is None
    steps.stop()
    wait_until(lambda: steps.poll() is None and len(asked()) > 2, "it is asked again")
    assert set(asked()) == {"--quiet --signal=TERM 7"}
    steps.kill()
    ended = wait_until(steps.poll, "it is killed")
    assert ended.lost_node
    steps.start(make_spec(), 1)
    assert steps._stop_at == steps._kill_at == math.inf
    steps.kill()
    wait_until(steps.poll, "it is killed")


def test_a_step_whose_srun_does_not_end_is_left_to_the_requeue(command, tmp_path, monkeypatch):
    command("srun", f"trap '' TERM; touch {tmp_path}/runs; while :; do sleep 0.05; done")
    monkeypatch.setattr(slurm_steps, "_SRUN_ENDS_S", 0.05)
    folder = JobFolder(tmp_path)
    folder.make()
    folder.write_spec(make_spec())
    steps = slurm_steps._Steps(folder, "7", "0", key="k" * 32)
    steps.start(make_spec(), 0)
    wait_until((tmp_path / "runs").exists, "it runs")
    steps.kill()
    assert "srun ended with -9" in wait_until(steps.poll, "it is killed").cause


@pytest.mark.parametrize("known", [(), ("5",), ("7",)])
def test_a_job_whose_submit_got_no_answer_makes_itself_known(tmp_path, monkeypatch, known):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_steps, "supervise_gang", lambda *_, **__: 0)
    folder = JobFolder(tmp_path)
    folder.make()
    folder.write_spec(make_spec())
    for ident in known:
        folder.write_job(Job(engine="slurm", ident=ident, host="", submitted_at="before"))
    assert supervise(folder.spec(), folder, StopFlag()) == 0
    assert (folder.job().ident, folder.job().submitted_at == "before") == ("7", known == ("7",))

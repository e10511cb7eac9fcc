"""Ranks that torchrun restarts after kills: they meet, and the run is the one that was never killed.

check_torchrun_restarts.py kills longer runs more often, in either order, with other stores and two agents.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from penstock.obs.sinks.jsonl import read_records
from tests.in_process import run_cli
from tests.ports import free_port
from tests.warm import penstock


def losses_of(run):
    records = read_records(run / "metrics.jsonl")
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if "loss" in r}


def ranks_of(agents):
    """Return the processes that torchrun's agents have started, by rank."""
    found = {}
    for agent in agents:
        for pid in map(int, Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            except OSError:  # it has ended
                continue
            found |= {int(v.removeprefix("RANK=")): pid for v in variables if v.startswith("RANK=")}
    return found


def start(recipe, *options, steps):
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts", "3"]
    words = ["-m", "penstock", "train", str(recipe), "--set", f"run.steps={steps}"]
    return subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True)


def await_step(run, step, agents):
    deadline = time.monotonic() + 300
    while step not in losses_of(run):
        assert all(agent.poll() is None for agent in agents), [a.communicate()[1] for a in agents]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)


def kill_in_turn(first, second, *, skew_s):
    """Kill two ranks, the second so much later; it is frozen until then, so that it does not leave before."""
    os.kill(second, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    time.sleep(skew_s)
    os.kill(second, signal.SIGKILL)


def unharmed(recipe, run, *, steps):
    """Return the losses of the run that was never killed."""
    words = ("--set", f"run.dir={run}", "--set", f"run.steps={steps}", "--processes", 2)
    done = penstock("train", recipe, *words)
    assert done.returncode == 0, done.stderr
    return losses_of(run)


def kill_and_restart(recipe, run, agents, *, kills, steps):
    """Run to the end under torchrun, and kill both ranks at some steps.

    Args:
        agents: options of each agent of torchrun.
        kills: step, the rank that is killed first, and seconds until the other is.
    """
    port = free_port()
    where = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"test-{port}"]
    where = ["--master-port", str(port)] if "--rdzv-backend" not in agents[0] else where
    running = [start(recipe, *where, *options, steps=steps) for options in agents]
    try:
        for step, first, skew_s in kills:
            await_step(run, step, running)
            ranks = ranks_of(running)
            kill_in_turn(ranks[first], ranks[1 - first], skew_s=skew_s)
        said = [agent.communicate(timeout=300)[1] for agent in running]
    finally:
        for agent in running:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(60)
    assert [agent.returncode for agent in running] == [0] * len(running), said


def assert_each_sample_once(run, *, steps, starts):
    audit = json.loads(run_cli("data", "audit", run, "--json").stdout)
    assert (audit["steps"], audit["samples"], audit["faults"]) == (steps, steps * 12, [])
    assert audit["ranks"] == [2] * starts


def test_a_run_whose_ranks_are_killed_under_torchrun_goes_on_exactly(recipe, tmp_path):
    run, static_store = tmp_path / "run", ["--nproc-per-node", "2"]
    kill_and_restart(recipe, run, [static_store], kills=[(14, 0, 2.0)], steps=24)
    assert losses_of(run) == unharmed(recipe, tmp_path / "unharmed", steps=24), "every digit of every step"
    assert_each_sample_once(run, steps=24, starts=2)


def train_as_rank(recipe, rank, **variables):
    where = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    return penstock("train", recipe, env=where | {"RANK": str(rank), "WORLD_SIZE": "2"} | variables)


def test_ranks_that_nobody_says_where_to_meet_are_told_so(recipe):
    done = train_as_rank(recipe, 1)
    assert done.returncode == 2
    assert "2 ranks, and no MASTER_ADDR and MASTER_PORT for their rendezvous" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_that_cannot_be_opened_is_a_paragraph(recipe):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = train_as_rank(recipe, 0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode == 1
    assert f"Rank 0 cannot open the store of the run at 127.0.0.1:{port}" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_group_that_does_not_start_is_a_paragraph(recipe):
    unknown = os.environ | {"GLOO_SOCKET_IFNAME": "nosuch0"}
    done = penstock("train", recipe, "--processes", 2, env=unknown)
    assert done.returncode == 1
    assert "could not connect to the others" in " ".join(done.stderr.split())
    assert "nosuch0" in done.stderr
    assert "Traceback" not in done.stderr

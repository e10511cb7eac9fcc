"""Ranks that torchrun restarts, with each store and with two agents: `make soak PART=faults`."""

import pytest

from tests.e2e.test_torchrun_restarts import (
    assert_each_sample_once,
    kill_and_restart,
    losses_of,
    unharmed,
)

STEPS = 100
KILLS = [(14, 0, 3.0), (37, 1, 1.5), (65, 0, 2.0)]
AGENTS = {
    "static": [["--nproc-per-node", "2"]],
    "c10d": [["--nproc-per-node", "2", "--rdzv-backend", "c10d"]],
    # the two agents' counts of restarts differ: only where a worker fails first is one counted
    "two nodes": [
        ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
    ]
    * 2,
}


@pytest.mark.parametrize("agents", AGENTS)
def test_a_run_whose_ranks_are_killed_under_torchrun_goes_on_exactly(recipe, tmp_path, agents):
    run = tmp_path / "run"
    kill_and_restart(recipe, run, AGENTS[agents], kills=KILLS, steps=STEPS)
    assert losses_of(run) == unharmed(recipe, tmp_path / "unharmed", steps=STEPS), "every digit of every step"
    assert_each_sample_once(run, steps=STEPS, starts=4)

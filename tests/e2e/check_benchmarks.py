"""Every benchmark runs, at sizes that take seconds, in a process of its own: `make soak PART=benchmarks`."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.netlab.hosts import why_not
from tests.pods import why_no_pods

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

RUNS = {
    "attention": "--cases 1 --rounds 1",
    "chaos": "--minutes 0 --only 'rank killed' 'slow card'",
    "checkpoint": "--mib 16 --rounds 1",
    "checkpoint_ranks": "--ranks 2 9 --times 1",
    "conformance": "",
    "console": "--runs 12 --each 20 --steps 600 --ranks 4 --rank-steps 20 --points 3 --rounds 1",
    "ethernet": "--tiny --hidden 32 --pace 0.01 --steps 2",
    "evaluate": "--questions 3 --hidden 64 --layers 1 --vocabulary 600 --words 6 --batches 2 auto "
    "--tune-questions 2",
    "imports": f"--before {BENCHMARKS.parent / 'src'} --runs 1",
    "loader_batch_hook": "--tokens 600K --rounds 1 --rows 2 --lengths 1024",
    "loader_scale": "--sizes 1e6 --processes 1",
    "loader_stress": "--tokens 12M --corpus-tokens 1M --changes 2 --save-every 1M --kill-every 2",
    "loader_throughput": "--tokens 600K --rounds 1 --lengths 4096 --no-peers",
    "loader_torture": "--tokens 60000 --only Penstock",
    "matrices": "--steps 2 --rounds 1 --tokens 1 --rows 8",
    "optimizers": "--hidden 64 --layers 1 --rounds 1",
    "families": "--hidden 256 --layers 2 --rounds 1 --only 'llama again' olmo2 'windows in turn'",
    "gpu_predict": "--device H100-80GB",
    "plan_accuracy": "",
    "plan_memory": "--only alone",
    "plan_netlab": "--rows benchmarks/data/netlab_naive.json",
    "plan_stories": "",
    "pod_networks": "--steps 2 --rounds 1 --hidden 64 --aim 0",
    "wire_codecs": "--numbers 10000 --rounds 1",
    "outer": "--steps 4 --seeds 1 --hidden 16",
    "prepare": "--mib 0.2 --rounds 1",
    "packing": "--lengths 1024 --pools 1",
    "serve": "--model tiny --only penstock 'penstock, http' --quick --threads 1 --calm 0 --concurrent 2 "
    "--load 1 --requests 3",
    "serve_target": "--model tiny --dtype float32 --rounds 1 --requests 4 --scale 0.2 --targets 20 200",
    "rank_balance": "--ranks 4 --rows 4 --steps 2 --rounds 1 --tokens 600000 --only balance packing",
    "shuffle_quality": "--tokens 300K --seeds 1",
    "shuffle_training": "--steps 4 --seeds 1",
    "speculate": "--seconds 0 --hidden 32 --layers 1 --tune-steps 1 --tokens 4 --requests 2 --rounds 1 "
    "--forced-model tiny --forced-tokens 2 --forced-requests 2",
    "tune": "--hidden 32 --layers 1 --vocabulary 400 --length 256 --rows 2 --conversations 60 --steps 4 "
    "--rounds 1 --threads 1 --network-steps 0 --only penstock trl",
    "tune_learns": "--hidden 32 --layers 1 --documents 60 --base-steps 40 --steps 12 --only full --no-aims",
    "train": "--hidden 64 --layers 2 --vocabulary 512 --length 32 --steps 2 --rounds 1",
}
OWN_TEST = {"gpu"}  # check_gpu_kit.py
TOO_LONG = {
    "elastic",  # a minute and a half of starts; test_launch_local.py disturbs the same run
    "jobset_peers",  # ten minutes of a control plane; test_operator.py lets our pods meet lost nodes
    "remote",  # a minute, most of it servers that start; tests/integration/remote has their parts
    "slurm_peers",  # ten minutes of a Slurm; test_launch_slurm.py lets our job meet the same events
}
TWO_VERSIONS = {"versions"}  # needs another checkout


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_and_files_its_result(name, tmp_path):
    run(name, tmp_path)


def run(name, folder):
    """Run a benchmark at its size of a test; it files its result in the folder."""
    needs = {"ethernet": why_not, "pod_networks": why_no_pods}
    if name in needs and (refused := needs[name]()):
        pytest.skip(refused)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *shlex.split(RUNS[name]), "--out", folder],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.json")
    result = json.loads(path.read_text())
    assert result["benchmark"] == name
    assert result["machine"]["cpu"]
    for drawing in folder.glob("*.svg"):
        assert drawing.read_text().startswith("<svg")


def test_the_console_benchmark_times_points_of_a_peer_and_files_a_peer_that_fails(tmp_path):
    pytest.importorskip("tensorboard_data_server")
    command = [sys.executable, BENCHMARKS / "console.py", "--only", "peers", "--peers", sys.executable]
    command += ["--runs", "3", "--each", "20", "--steps", "40", "--points", "2", "--rounds", "1"]
    subprocess.run([*command, "--out", tmp_path], check=True, stdout=subprocess.DEVNULL, timeout=280)
    (path,) = tmp_path.glob("console-*.json")
    rows = json.loads(path.read_text())["rows"]
    for asked in ("stream", "pressed"):
        assert len(rows[f"tensorboard, {asked}"]["delay_ms"]) == 2
        assert "failed" not in rows[f"tensorboard, {asked}"]
    assert "failed" in rows["trackio, stream"]  # not in this environment

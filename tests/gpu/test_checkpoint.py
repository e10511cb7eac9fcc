"""Checkpoints that the device wrote, read by a process that sees no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.checkpoint.tensors import training_tensors
from penstock.engine.model_runner.open import open_model
from penstock.parallel.mesh import World, join
from penstock.testing.training import records_of
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state
from penstock.train.state import TrainState

safetensors = pytest.importorskip("safetensors.torch")
RULES = ("adamw", "adamw_8bit")


def recipe_of(folder, rule):
    return build_recipe(
        {
            "run": {"dir": str(folder / rule), "steps": 3},
            "model": {
                "hidden_size": 128,
                "intermediate_size": 208,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 307,
            },
            "data": {
                "corpora": {"c": {"path": "synthetic:tokens=1M,vocab_size=307"}},
                "sequence_length": 64,
                "global_batch_size": 4,
            },
            "optim": {"rule": rule, "learning_rate": 1e-2},
        }
    )


def tensors_of(state: TrainState):
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().contiguous()
        for name, tensor in training_tensors(state.model, state.optimizer).items()
    }


def read_all(folder, world: World):
    """Resume each run, and write what it resumed with."""
    for rule in RULES:
        state = open_state(recipe_of(folder, rule), world)
        assert state.step == 3
        safetensors.save_file(tensors_of(state), folder / f"{rule}-read.safetensors")


@pytest.fixture(scope="module")
def folder(device, tmp_path_factory):
    """Runs of three steps on the device, what they ended with, and what a process without a GPU reads."""
    path = tmp_path_factory.mktemp("runs")
    with join() as world:
        assert world.device.type == device.type
        for rule in RULES:
            state = open_state(recipe_of(path, rule), world)
            records_of(state, recipe_of(path, rule), world)
            safetensors.save_file(tensors_of(state), path / f"{rule}-written.safetensors")
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=90,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"device": "cpu"}
    return path


@pytest.mark.parametrize("rule", RULES)
def test_weights_and_states_of_the_optimizer_are_read_on_a_cpu_to_the_bit(rule, folder):
    written, read = (
        safetensors.load_file(folder / f"{rule}-{what}.safetensors") for what in ("written", "read")
    )
    assert any(name.startswith("optimizer.") for name in written)
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(read[name], tensor), name


def test_the_model_is_opened_for_serving_as_it_was_saved(folder):
    written = safetensors.load_file(folder / "adamw-written.safetensors")
    model, _ = open_model(folder / "adamw")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, written[f"model.{name}"]), name


if __name__ == "__main__":
    with join() as world:
        read_all(Path(sys.argv[1]), world)
        print(json.dumps({"device": world.device.type}))

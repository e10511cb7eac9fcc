"""Modules without values: on no device, without a draw, and without torch's compiler."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from penstock.nn.unfilled import unfilled

MODULES = {
    "embedding": lambda: nn.Embedding(3, 4),
    "linear": lambda: nn.Linear(3, 4),
    "norm": lambda: nn.RMSNorm(4),
}


@pytest.mark.parametrize("name", MODULES)
def test_parameters_have_the_shapes_of_filled_ones_and_no_memory(name: str) -> None:
    with unfilled():
        module = MODULES[name]()
    filled = MODULES[name]().state_dict()
    assert {n: tensor.shape for n, tensor in module.state_dict().items()} == {
        n: tensor.shape for n, tensor in filled.items()
    }
    assert all(parameter.is_meta and parameter.requires_grad for parameter in module.parameters())


def test_no_random_number_is_drawn_and_afterwards_modules_are_filled_again() -> None:
    torch.manual_seed(0)
    expected = nn.Embedding(3, 4).weight
    torch.manual_seed(0)
    with unfilled():
        nn.Embedding(3, 4)
    assert torch.equal(nn.Embedding(3, 4).weight, expected)


def test_torchs_compiler_is_not_loaded() -> None:
    code = """
import sys
from torch import nn
from penstock.nn.unfilled import unfilled
with unfilled():
    nn.Embedding(3, 4).to_empty(device="cpu")
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Weights in bfloat16: what a copy keeps, and what random rounding keeps on average."""

import pytest
import torch
from torch import nn

from penstock.train.optim.optimizer import Optimizer, build_optimizer
from penstock.train.optim.weight_storage import STORAGES
from penstock.train.recipe.config import Weights
from penstock.train.recipe.optim_config import OptimConfig


def fitted(weights: Weights, *, steps: int, seed: int = 0) -> tuple[nn.Linear, Optimizer]:
    """Move weights of 1 by -1e-4 a step: a fortieth of the distance between bfloat16 numbers there."""
    model = nn.Linear(64, 64, bias=False, dtype=STORAGES[weights].dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    config = OptimConfig(learning_rate=1e-4, beta1=0.0, beta2=0.0, weight_decay=0.0)
    optimizer = build_optimizer(model, config, weights=weights, seed=seed)
    for _ in range(steps):
        model.weight.grad = torch.ones_like(model.weight)  # adamw then moves by the learning rate
        optimizer.step()
    return model, optimizer


def test_a_float32_copy_loses_no_update_and_the_weights_are_its_nearest() -> None:
    model, optimizer = fitted("bfloat16_master", steps=50)
    master = optimizer.state[model.weight]["master"]
    torch.testing.assert_close(master, torch.full_like(master, 1 - 50e-4), rtol=0, atol=1e-5)
    assert torch.equal(model.weight, master.bfloat16())


def test_random_rounding_keeps_on_average_what_rounding_to_nearest_would_lose() -> None:
    """4,096 weights after 50 steps of 1e-4: the spread of each is under 4e-3, that of their mean 6e-5."""
    model, optimizer = fitted("bfloat16_stochastic", steps=50)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.float().mean().item() == pytest.approx(1 - 50e-4, abs=3e-4)
    assert len(model.weight.unique()) > 1
    assert "master" not in optimizer.state[model.weight]


def test_random_rounding_follows_the_seed() -> None:
    first, again, other = (fitted("bfloat16_stochastic", steps=3, seed=seed)[0].weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)

"""Muon against torch.optim.Muon, and who gets which rule."""

import pytest
import torch
from torch import nn

from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.train.optim.muon import orthogonal
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.optim.whole_matrices import deal
from penstock.train.recipe.optim_config import OptimConfig

CONFIG = DecoderConfig(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2
)


def test_matrices_of_the_blocks_follow_muon_and_the_rest_adamw() -> None:
    model = Decoder(CONFIG)
    optimizer = build_optimizer(model, OptimConfig(rule="muon"))
    rules = {id(p): group["rule"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        inside = name.startswith("layers.") and "norm" not in name
        assert rules[id(parameter)] == ("muon" if inside else "adamw"), name


def test_every_bit_is_that_of_torch_s_muon() -> None:
    ours, theirs = Decoder(CONFIG), Decoder(CONFIG)
    for model in (ours, theirs):
        init_weights(model, seed=0)
    optimizer = build_optimizer(ours, OptimConfig(rule="muon", learning_rate=0.01, weight_decay=0.1))
    inner = [p for p in theirs.layers.parameters() if p.ndim == 2]
    reference = torch.optim.Muon(
        inner, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours.layers.parameters(), theirs.layers.parameters(), strict=True):
        assert torch.equal(mine, other) or mine.ndim == 1
    assert not torch.equal(ours.embed.weight, theirs.embed.weight), "adamw moved it"


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_what_is_orthogonal_keeps_directions_and_levels_sizes(shape: tuple[int, int]) -> None:
    """Jordan's coefficients bring singular values near 1, not to it; a square's smallest stay small."""
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ orthogonal(matrix.bfloat16()).float() @ right.T
    sizes = found.diagonal()
    torch.testing.assert_close(found, torch.diag(sizes), rtol=0, atol=0.05)
    assert sizes.max() < 1.3
    assert sizes.median() > 0.6


def test_matrices_are_dealt_in_even_shares() -> None:
    costs = [4.0] * 8 + [11.0] * 3
    owners = deal(costs, num_owners=4)
    totals = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(4)]
    assert sum(totals) == sum(costs)
    assert max(totals) <= 4 / 3 * -(-sum(costs) // 4)


def test_a_model_without_blocks_follows_adamw() -> None:
    (group,) = build_optimizer(nn.Linear(4, 3, bias=False), OptimConfig(rule="muon")).param_groups
    assert group["rule"] == "adamw"

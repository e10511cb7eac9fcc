"""Steps of the optimizers on the device: AdamW by its formula in float64, 8 bits too, Muon as torch's."""

import pytest
import torch
from tests.families import small_llama
from torch import nn

from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.nn.linear.rounding import from_codes, to_codes
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.recipe.optim_config import BLOCK, OptimConfig


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit"])
def test_steps_of_adamw_are_those_of_the_formula_in_float64(rule, device, is_tiny):
    """From the moments as they are stored, so that in 8 bits too the step itself is exact to float32."""
    model = nn.Linear(200 if is_tiny else 5000, 37, bias=False, device=device)  # whole blocks and a short one
    config = OptimConfig(rule=rule, learning_rate=0.01, weight_decay=0.1)
    optimizer = build_optimizer(model, config)
    weight = model.weight.detach().double().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 5):
        gradient = torch.randn_like(model.weight)
        model.weight.grad = gradient
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.95 * second + 0.05 * gradient.double() ** 2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        weight = weight - 0.01 * (update + 0.1 * weight)
        torch.testing.assert_close(model.weight.detach().double(), weight, rtol=0, atol=2e-6)
        if rule == "adamw_8bit":
            first, second = stored(first, signed=True), stored(second, signed=False)


def stored(moment, *, signed):
    return from_codes(
        *to_codes(moment.float(), block=BLOCK, signed=signed), block=BLOCK, signed=signed
    ).double()


def test_steps_of_muon_are_those_of_torch(device):
    sizes = {"hidden_size": 96, "intermediate_size": 144, "num_attention_heads": 3, "num_key_value_heads": 1}
    ours, theirs = (Decoder(small_llama(**sizes)).to(device) for _ in range(2))
    for model in (ours, theirs):
        init_weights(model, seed=0)
    optimizer = build_optimizer(ours, OptimConfig(rule="muon", learning_rate=0.01, weight_decay=0.1))
    reference = torch.optim.Muon(
        [p for p in theirs.layers.parameters() if p.ndim == 2],
        lr=0.01,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    before = [p.detach().clone() for p in ours.layers.parameters()]
    for _ in range(4):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for mine, other, start in zip(ours.layers.parameters(), theirs.layers.parameters(), before, strict=True):
        if mine.ndim == 2:
            # both orthogonalise in bfloat16, whose products may sum in another order
            assert (mine - other).norm() < 0.02 * (other - start).norm()

"""AdamW: decay on matrices only, its steps against the formula and torch's own, 8 bits near 32."""

import pytest
import torch
from torch import nn

from penstock.core.errors import ConfigError
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.nn.linear.rounding import from_codes, to_codes
from penstock.train.optim.optimizer import Optimizer, build_optimizer
from penstock.train.recipe.optim_config import BLOCK, OptimConfig

CONFIG = DecoderConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    attention_bias=True,
)


def test_matrices_are_decayed_and_norms_and_biases_are_not() -> None:
    model = Decoder(CONFIG)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.25))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    assert len(optimizer.param_groups) == 2, "each group launches kernels of its own"
    for name, parameter in model.named_parameters():
        one_dimensional = name.endswith("bias") or "norm" in name
        assert decay[id(parameter)] == (0.0 if one_dimensional else 0.25), name


def test_frozen_parameters_are_left_out_and_so_are_empty_groups() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    (group,) = build_optimizer(model, OptimConfig()).param_groups
    assert [p is model.weight for p in group["params"]] == [True]


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_step_is_that_of_adamw(rule: str, decay: float) -> None:
    """Loshchilov and Hutter, algorithm 2, in float64; 1e-6: the optimizer works in float32."""
    model = nn.Linear(4, 3, bias=False)  # too small for 8 bits
    config = OptimConfig(
        rule=rule,
        learning_rate=0.01,
        beta1=0.8,
        beta2=0.9,
        eps=1e-6,
        weight_decay=decay,  # type: ignore[arg-type]
    )
    optimizer = build_optimizer(model, config)
    weight = model.weight.detach().double().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 4):
        gradient = torch.full_like(weight, 0.5) / step
        model.weight.grad = gradient.float()
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        update = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
        weight = weight - 0.01 * (update + decay * weight)
        torch.testing.assert_close(model.weight.detach().double(), weight, rtol=0, atol=1e-6)


def test_every_bit_is_that_of_torch_s_fused_adamw() -> None:
    ours, theirs = Decoder(CONFIG), Decoder(CONFIG)
    for model in (ours, theirs):
        init_weights(model, seed=0)
    optimizer = build_optimizer(ours, OptimConfig(learning_rate=0.01, weight_decay=0.1))
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=True,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def trained(rule: str) -> tuple[nn.Linear, Optimizer, float]:
    """Fit a linear map; return it, its optimizer and its last loss."""
    generator = torch.Generator().manual_seed(0)
    inputs, goal = (torch.randn(*shape, generator=generator) for shape in ((64, 200), (200, 24)))
    model = nn.Linear(200, 24, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = build_optimizer(model, OptimConfig(rule=rule, learning_rate=0.05, weight_decay=0.0))  # type: ignore[arg-type]
    for _ in range(15):
        loss = (model(inputs) - inputs @ goal).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, loss.item()


def test_eight_bit_moments_follow_the_published_method_in_float64() -> None:
    """Each step from the moments as they are stored: the update itself then differs by float32 only."""
    torch.manual_seed(0)
    model = nn.Linear(200, 40, bias=False)  # a row is a whole block and a short one
    config = OptimConfig(rule="adamw_8bit", learning_rate=0.01, weight_decay=0.1)
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
        torch.testing.assert_close(model.weight.detach().double(), weight, rtol=0, atol=1e-6)
        first = from_codes(
            *to_codes(first.float(), block=BLOCK, signed=True), block=BLOCK, signed=True
        ).double()
        second = from_codes(
            *to_codes(second.float(), block=BLOCK, signed=False), block=BLOCK, signed=False
        ).double()


def test_eight_bit_moments_train_as_well_as_float32_ones_in_a_quarter_of_the_memory() -> None:
    _, whole, wanted = trained("adamw")
    model, coded, found = trained("adamw_8bit")
    assert found < 1.1 * wanted
    sizes = []
    for optimizer in (whole, coded):
        (states,) = optimizer.state.values()
        sizes.append(sum(state.numel() * state.element_size() for state in states.values()))
    assert sizes[1] * 3.8 < sizes[0] == 8 * model.weight.numel() + 4


def test_betas_and_momentum_out_of_range_are_refused() -> None:
    for name in ("beta1", "beta2", "momentum"):
        with pytest.raises(ConfigError, match=rf"optim.{name} must be in \[0, 1\) \(got 1.0\)"):
            OptimConfig(**{name: 1.0})

"""AdamW: decay on matrices only, one step against the formula."""

import pytest
import torch
from torch import nn

from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.train.config import OptimConfig
from penstock.train.optim import adamw

CONFIG = LlamaConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    attention_bias=True,
)


def test_matrices_are_decayed_and_norms_and_biases_are_not() -> None:
    model = Llama(CONFIG)
    optimizer = adamw(model, OptimConfig(weight_decay=0.25))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        one_dimensional = name.endswith("bias") or "norm" in name
        assert decay[id(parameter)] == (0.0 if one_dimensional else 0.25), name


def test_frozen_parameters_are_left_out_and_so_are_empty_groups() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    (group,) = adamw(model, OptimConfig()).param_groups
    assert [p is model.weight for p in group["params"]] == [True]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_step_is_that_of_adamw(decay: float) -> None:
    """Loshchilov and Hutter, algorithm 2, in float64; 1e-6: the optimizer works in float32."""
    model = nn.Linear(4, 3, bias=False)
    config = OptimConfig(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=decay)
    optimizer = adamw(model, config)
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

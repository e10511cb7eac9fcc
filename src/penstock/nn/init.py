"""Initial weights as a function of (seed, parameter name, element index), independent of the sharding.

A generator fills a tensor in one order, so its values on a rank depend on the number of ranks. Here each
element is hashed from its own index: a rank fills the rows it owns, and no rank holds, sends or samples the
whole tensor. The hash is `core.rng.mix64`. Its halves are two uniforms, the Box-Muller transform makes them
normal, and values beyond three standard deviations (0.27%) are folded back.
Angles and logarithms are float64, so that differences in a library's last bit vanish in float32.

Scale: 0.02 everywhere, divided by sqrt(2 x layers) for the projections that write to the residual
stream (Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3).
"""

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from penstock.core.rng import key_of
from penstock.nn.dtensor import local
from penstock.nn.kinds import parameter_kinds
from penstock.nn.linear.lora import adapted_layers
from penstock.nn.random_bits import element_indices, keyed_bits, shifted


@runtime_checkable
class HasInitialStd(Protocol):
    """A model that knows the standard deviation of its initial weights."""

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of a weight matrix, by its fully qualified name."""
        ...


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int) -> None:
    """Fill every parameter in place: matrices normal, other kinds with the value that their module states.

    Works on plain and on sharded (DTensor) parameters of any device. A rank computes only its own shard.
    Sharded and whole models get the same values, bit for bit.

    Args:
        model: has `initial_std`, and storage for its parameters (`to_empty` after the meta device).
    """
    assert isinstance(model, HasInitialStd), type(model)
    for name, parameter, kind in parameter_kinds(model):
        if kind.initial is None:
            fill_normal(parameter, key_of(seed, "init", name), std=model.initial_std(name))
        else:
            local(parameter).fill_(kind.initial)


@torch.no_grad()
def init_adapters(model: nn.Module, *, seed: int) -> None:
    """Fill the adapters of a model, sharded or not: A uniform as in PEFT, B zero.

    A's values are a function of (seed, name, index); with Kaiming's rule for a slope of sqrt(5) they are
    uniform up to 1 / sqrt(inputs). `measure_magnitudes` sets magnitudes once the frozen weights are there.
    """
    for name, layer in adapted_layers(model):
        a = layer.get_parameter("lora_a")
        fill_uniform(a, key_of(seed, "init", f"{name}.lora_a"), limit=1 / math.sqrt(layer.in_features))
        local(layer.get_parameter("lora_b")).zero_()


@torch.no_grad()
def fill_uniform(parameter: Tensor, key: int, *, limit: float) -> None:
    """Fill a tensor, or this rank's shard of it, with uniform values from -`limit` to `limit`."""
    flat = local(parameter).view(-1)
    for some, index in element_indices(parameter):
        share = (shifted(keyed_bits(index, key), 11).double() + 0.5) / 2**53
        flat[some] = ((2 * share - 1) * limit).to(flat.dtype)


@torch.no_grad()
def fill_normal(parameter: Tensor, key: int, *, std: float) -> None:
    """Fill a tensor, or this rank's shard of it, with normal values truncated at 3 `std`."""
    flat = local(parameter).view(-1)
    for some, index in element_indices(parameter):
        flat[some] = (normal(index, key) * std).to(flat.dtype)


def normal(index: Int64[Tensor, "n"], key: int) -> Tensor:
    """Return standard normal values folded into [-3, 3], [n] float64, one per index.

    >>> normal(torch.tensor([0, 1]), 7).equal(normal(torch.tensor([1, 0]), 7).flip(0))
    True
    """
    bits = keyed_bits(index, key)
    first = (shifted(bits, 32).double() + 0.5) / 2**32  # never 0, whose logarithm is infinite
    second = (bits & 0xFFFFFFFF).double() / 2**32
    values = torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
    excess = (values.abs() - 3).clamp(min=0)
    return values - 2 * excess * values.sign()

"""Initial weights as a function of (seed, parameter name, element index), however they are sharded.

A generator walks through one tensor in one order, so what a rank draws depends on how many ranks
there are. Here each element is hashed from its own index: a rank fills the rows it owns and nobody
ever holds, sends or draws the whole. The hash is `core.rng.mix64` in torch's int64 arithmetic; its
halves are two uniforms, the Box-Muller transform makes them normal, and what falls beyond three
standard deviations (0.27%) is folded back. Angles and logarithms are float64, so that a library's
last bit is gone after rounding to float32.

Scale: 0.02 everywhere, divided by sqrt(2 x layers) for the projections that write to the residual
stream (Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3).
"""

import math
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.core.rng import key_of
from penstock.nn.shard_box import held_box

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 2**18  # elements at a time: about 10 MB of temporaries, which stay in a CPU's cache
_CHUNK_ON_GPU = 2**23  # few launches, for a third of a gigabyte


@runtime_checkable
class HasInitialStd(Protocol):
    """A model that says how large its weights start."""

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of a weight matrix by its fully qualified name."""
        ...


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int) -> None:
    """Fill every parameter in place: matrices normal, norms one, biases zero.

    Works on plain and on sharded (DTensor) parameters of any device; on each rank only its shard
    is computed. Sharded and whole models get the same values, bit for bit.

    Args:
        model: has `initial_std`; built anywhere, materialised (`to_empty`) before the call.
    """
    assert isinstance(model, HasInitialStd), type(model)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            _local(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            fill_normal(parameter, key_of(seed, "init", name), std=model.initial_std(name))


@torch.no_grad()
def fill_normal(parameter: Tensor, key: int, *, std: float) -> None:
    """Fill a tensor, or this rank's shard of it, with normal values truncated at 3 `std`."""
    flat = _local(parameter).view(-1)
    for some, index in element_indices(parameter):
        flat[some] = (normal(index, key) * std).to(flat.dtype)


def element_indices(parameter: Tensor) -> Iterator[tuple[slice, Int64[Tensor, "n"]]]:
    """Yield runs of what this rank holds, flat, and the index of each element in the whole tensor."""
    local = _local(parameter)
    offset, shape = held_box(parameter)
    assert local.is_contiguous() and tuple(local.shape) == shape, (local.stride(), local.shape, shape)  # noqa: PT018
    chunk = _CHUNK if local.device.type == "cpu" else _CHUNK_ON_GPU
    for start in range(0, local.numel(), chunk):
        stop = min(start + chunk, local.numel())
        counter = torch.arange(start, stop, device=local.device)
        index = _global_index(counter, shape, offset=offset, full=tuple(parameter.shape))
        yield slice(start, stop), index


def keyed_bits(index: Int64[Tensor, "n"], key: int) -> Int64[Tensor, "n"]:
    """Return 64 random bits for each index, the same on every machine."""
    return mix64(index ^ _signed(key))


def normal(index: Int64[Tensor, "n"], key: int) -> Tensor:
    """Return standard normal values folded into [-3, 3], [n] float64, one per index.

    >>> normal(torch.tensor([0, 1]), 7).equal(normal(torch.tensor([1, 0]), 7).flip(0))
    True
    """
    bits = keyed_bits(index, key)
    first = (_shift(bits, 32).double() + 0.5) / 2**32  # never 0, whose logarithm is infinite
    second = (bits & 0xFFFFFFFF).double() / 2**32
    values = torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
    excess = (values.abs() - 3).clamp(min=0)
    return values - 2 * excess * values.sign()


def mix64(values: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
    """Scramble 64-bit integers; the same bits as `core.rng.mix64`, whose source is there."""
    z = values + _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    return z ^ _shift(z, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    # torch shifts signed integers arithmetically; the mask removes the copies of the sign
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _global_index(
    counter: Tensor, shape: tuple[int, ...], *, offset: tuple[int, ...], full: tuple[int, ...]
) -> Tensor:
    if shape[1:] == full[1:]:  # whole rows: no division by element
        return counter + offset[0] * math.prod(full[1:])
    index, stride = torch.zeros_like(counter), 1
    for size, first, whole in zip(reversed(shape), reversed(offset), reversed(full), strict=True):
        index += (counter % size + first) * stride
        counter = counter // size
        stride *= whole
    return index

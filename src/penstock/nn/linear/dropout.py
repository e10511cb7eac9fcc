"""Dropout of an adapter's inputs, whose masks are functions of seed, step, layer, sample and position.

A generator would draw other masks where activations are recomputed, on another number of ranks, and after a
resume. Here each number is hashed: the key of a token (`token_keys`) with the key of the layer, and then with
the number of the input. A word of 64 bits decides on four inputs, each by 16 bits, so rates are multiples of
1 / 65536. The backward pass makes the mask again, so that none is kept.

Keys reach the layers with the rotary tables, as the last tensor, which `with_token_keys` takes off: a pass
without keys (validation, answers) drops nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from penstock.core.rng import key_of
from penstock.nn.random_bits import mix64, signed

_PER_WORD = 4
_VALUES = 2**16


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of one layer's inputs."""

    rate: float
    """Share of inputs that are dropped; others are multiplied by 1 / (1 - rate)."""
    key: int
    """Key of the layer, an int64."""
    first: int = 0
    """Number of this rank's first input, where inputs are sliced."""

    @classmethod
    def of(cls, rate: float, layer: str, first: int = 0) -> "Dropout":
        """Return the dropout of a layer, by its name in the model."""
        return cls(rate, signed(key_of(0, "dropout", layer)), first)

    @property
    def num_dropped(self) -> int:
        """Values of 16 bits that drop an input."""
        return round(self.rate * _VALUES)

    @property
    def scale(self) -> float:
        """Factor on the inputs that stay."""
        return _VALUES / (_VALUES - self.num_dropped)

    def kept(self, keys: Int64[Tensor, "... "], size: int) -> Bool[Tensor, "... inputs"]:
        """Return True for each of `size` inputs of each token that stays."""
        start, past = self.first // _PER_WORD, -(-(self.first + size) // _PER_WORD)
        words = torch.arange(start, past, device=keys.device)
        of_layer = mix64(keys ^ self.key)
        bits = mix64(of_layer[..., None] ^ words).view(torch.int16)
        skipped = self.first - start * _PER_WORD
        return bits[..., skipped : skipped + size] >= self.num_dropped - _VALUES // 2

    def __call__(self, x: Float[Tensor, "... inputs"], keys: Tensor | None) -> Float[Tensor, "... inputs"]:
        """Drop inputs; none without keys."""
        if keys is None:
            return x
        out: Tensor = _Drop.apply(x, keys, self)  # type: ignore[no-untyped-call]
        return out


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, dropout: Dropout) -> Tensor:  # Any: torch's context
        ctx.save_for_backward(keys)
        ctx.dropout = dropout
        return _dropped(x, keys, dropout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = ctx.saved_tensors
        return _dropped(gradients[0], keys, ctx.dropout), None, None


def _dropped(x: Tensor, keys: Tensor, dropout: Dropout) -> Tensor:
    return torch.where(dropout.kept(keys, x.shape[-1]), x * dropout.scale, 0.0)


def token_keys(
    sample_ids: Int64[Tensor, "rows"], length: int, *, seed: int, step: int
) -> Int64[Tensor, "rows length"]:
    """Return the key of each token of some rows in a step.

    Args:
        sample_ids: number of each row in the order of the run.
    """
    of_rows = mix64(sample_ids.long() ^ signed(key_of(seed, "dropout", step)))
    return mix64(of_rows[:, None] ^ torch.arange(length, device=sample_ids.device))


def with_token_keys(model: nn.Module) -> None:
    """Let each block of a model with dropout take token keys with its rotary tables, in place."""
    for block in cast(nn.ModuleList, model.layers):
        layers = [layer for layer in block.modules() if getattr(layer, "dropout", None) is not None]
        block.forward = partial(_with_keys, block.forward, layers)


def _with_keys(
    forward: Callable[..., Any], layers: list[nn.Module], x: Tensor, rope: tuple[Tensor, ...], *others: Any
) -> Any:  # Any: arguments and result of a block
    keys = [table for table in rope if not table.is_floating_point()]
    _give(layers, keys[0] if keys else None)
    try:
        return forward(x, tuple(table for table in rope if table.is_floating_point()), *others)
    finally:
        _give(layers, None)


def _give(layers: list[nn.Module], keys: Tensor | None) -> None:
    for layer in layers:
        layer.token_keys = keys  # type: ignore[assignment]  # not a parameter

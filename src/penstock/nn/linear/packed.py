"""Linear layers for serving: matrices packed for the CPU, and layers with one input merged.

A matrix is cut into panels of 32 outputs. A panel holds, input after input, one unit of 4 bytes (one float32,
two bfloat16, four int8) of each of its outputs: [panels, units, 32, numbers of a unit]. The C++ operator
`penstock::linear` (nn/native/product_wide.h) reads it once for up to 264 tokens. Without that operator a
layer stays unchanged.

Query, key and value, or gate and up, are separate parameters in training and on disk. In serving they are
merged: one matrix has the rows of all, is read in one sweep, and takes one call. The parts keep their names,
so that an adapter or a rank's slice finds its own rows.

Merge before matrices are packed or quantised: those steps replace `MergedLinear.linear`, as they replace any
`nn.Linear` of a model, and the names stay.
"""

import math
from collections.abc import Mapping
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.huge_pages import reserve
from penstock.nn import native

PANEL = 32
_UNIT_BYTES = 4


def can_multiply(like: Tensor) -> bool:
    """Return True if the C++ operators multiply tokens of this dtype and device by panels."""
    is_of_type = like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16)
    return is_of_type and native.is_available()


def empty_panels(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return zeros in the shape of panels."""
    numbers = _UNIT_BYTES // dtype.itemsize
    return in_huge_pages((-(-outputs // PANEL), inputs // numbers, PANEL, numbers), dtype)


def in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros, in huge pages if available."""
    size = math.prod(shape)
    return torch.frombuffer(reserve(size * dtype.itemsize), dtype=dtype, count=size).view(shape)


def to_panels(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "panels units 32 numbers"]:
    """Return a matrix as panels, the last padded with zeros: `penstock::pack` in plain PyTorch.

    >>> to_panels(torch.ones(40, 6)).shape
    torch.Size([2, 6, 32, 1])
    """
    whole = functional.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))
    numbers = _UNIT_BYTES // matrix.dtype.itemsize
    return whole.view(-1, PANEL, matrix.shape[1] // numbers, numbers).transpose(1, 2).contiguous()


def from_panels(panels: Float[Tensor, "panels units 32 numbers"], outputs: int) -> Float[Tensor, "o i"]:
    """Return the matrix of panels, [outputs, inputs]."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:outputs]


class PackedLinear(nn.Module):
    """A linear layer over panels, float32 or bfloat16: a copy of a layer for which `can_multiply` is True."""

    panels: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        panels = empty_panels(self.out_features, self.in_features, weight.dtype)
        torch.ops.penstock.pack(weight.contiguous(), panels)
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def matrix(self) -> Float[Tensor, "outputs inputs"]:
        """Return the matrix, from its panels."""
        return from_panels(self.panels, self.out_features)

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Return the layer's outputs, [..., outputs]; a token's result does not depend on other tokens."""
        out: Tensor = torch.ops.penstock.linear(x, self.panels, None, None, self.bias, self.out_features)
        return out


def packed(linear: nn.Linear) -> nn.Module:
    """Return the fastest layer that computes the same on the matrix's device; it may be `linear` itself."""
    weight = linear.weight
    numbers = _UNIT_BYTES // weight.dtype.itemsize
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        return linear
    if can_multiply(weight) and linear.in_features % numbers == 0:
        return PackedLinear(linear)
    return linear


class MergedLinear(nn.Module):
    """One linear layer with the outputs of several layers, one after the other.

    Args:
        linear: from the shared input to all outputs; may be replaced by a layer that computes the same.
        parts: name and number of outputs of each layer, in the order of the rows.
    """

    def __init__(self, linear: nn.Module, parts: tuple[tuple[str, int], ...]) -> None:
        super().__init__()
        self.linear = linear
        self.parts = parts
        self._sizes = [rows for _, rows in parts]

    @classmethod
    def of(cls, layers: Mapping[str, nn.Linear]) -> Self:
        """Merge layers; weights are copied, and a part without bias gets zeros if another has one."""
        weights = [layer.weight.detach() for layer in layers.values()]
        biases = [layer.bias for layer in layers.values()]
        num_outputs = sum(len(weight) for weight in weights)
        linear = nn.Linear(weights[0].shape[1], num_outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        if any(bias is not None for bias in biases):
            whole = [
                weight.new_zeros(len(weight)) if bias is None else bias.detach()
                for weight, bias in zip(weights, biases, strict=True)
            ]
            linear.bias = nn.Parameter(torch.cat(whole), requires_grad=False)
        return cls(linear, tuple((name, len(w)) for name, w in zip(layers, weights, strict=True)))

    def rows(self, name: str) -> range:
        """Return the rows of a part; raise KeyError if the name is unknown.

        >>> MergedLinear(nn.Identity(), (("query", 4), ("key", 2))).rows("key")
        range(4, 6)
        """
        start = 0
        for part, size in self.parts:
            if part == name:
                return range(start, start + size)
            start += size
        raise KeyError(name)

    def split(self, out: Float[Tensor, "... outputs"]) -> tuple[Tensor, ...]:
        """Return each part's outputs, as views of the result of `forward`."""
        return torch.split(out, self._sizes, dim=-1)

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Return the outputs of all parts in one tensor."""
        out: Tensor = self.linear(x)
        return out

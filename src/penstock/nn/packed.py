"""Linear layers for serving, whose matrices lie in memory in the order in which the CPU reads them.

A matrix is cut into panels of 32 outputs, and a panel holds, input after input, one unit of 4 bytes (one
float32, two bfloat16, four int8) of each of its outputs: [panels, units, 32, numbers of a unit]. The C++
operator `penstock::linear` (nn/native/panels.h) reads it once for up to 14 tokens, or 32 by the CPU's matrix
tiles (AMX). Where that operator cannot be had but there are such tiles, PyTorch's oneDNN packs instead; where
neither applies a layer stays what it is.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.huge_pages import reserve
from penstock.nn import native

PANEL = 32
_UNIT_BYTES = 4


def can_multiply(bits: int, like: Tensor) -> bool:
    """Return whether the C++ operators multiply tokens like these by matrices of so many bits."""
    is_of_type = like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16)
    return is_of_type and native.is_available() and bool(torch.ops.penstock.has_linear(bits))


def has_tiles() -> bool:
    """Return whether oneDNN multiplies bfloat16 by the matrix tiles of this CPU."""
    has_onednn: bool = torch._C._has_mkldnn
    return has_onednn and bool(torch.cpu._is_amx_tile_supported())


def empty_panels(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return zeros of the shape of panels, in huge pages where there are any."""
    numbers = _UNIT_BYTES // dtype.itemsize
    shape = (-(-outputs // PANEL), inputs // numbers, PANEL, numbers)
    size = math.prod(shape)
    return torch.frombuffer(reserve(size * dtype.itemsize), dtype=dtype, count=size).view(shape)


def to_panels(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "panels units 32 numbers"]:
    """Return a matrix as panels, the last filled up with zeros: what `penstock::pack` does, in plain PyTorch.

    >>> to_panels(torch.ones(40, 6)).shape
    torch.Size([2, 6, 32, 1])
    """
    whole = functional.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))
    numbers = _UNIT_BYTES // matrix.dtype.itemsize
    return whole.view(-1, PANEL, matrix.shape[1] // numbers, numbers).transpose(1, 2).contiguous()


def from_panels(panels: Float[Tensor, "panels units 32 numbers"], outputs: int) -> Float[Tensor, "o i"]:
    """Return the matrix that panels hold."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:outputs]


class PackedLinear(nn.Module):
    """A linear layer over panels, float32 or bfloat16; a copy of a layer that `can_multiply`."""

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

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer; a token's result does not depend on the others."""
        out: Tensor = torch.ops.penstock.linear(x, self.panels, self.bias, self.out_features)
        return out


class TiledLinear(nn.Module):
    """A bfloat16 linear layer whose matrix oneDNN has put into its own order; for who has no C++ compiler."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # no buffer: oneDNN's tensors cannot be moved or saved
        self.matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), 1)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.bias, "none", [], "")
        return out


def packed(linear: nn.Linear) -> nn.Module:
    """Return the fastest layer that computes the same on the matrix's device: perhaps the layer itself."""
    weight = linear.weight
    numbers = _UNIT_BYTES // weight.dtype.itemsize
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        return linear
    if can_multiply(8 * weight.dtype.itemsize, weight) and linear.in_features % numbers == 0:
        return PackedLinear(linear)
    return TiledLinear(linear) if weight.dtype == torch.bfloat16 and has_tiles() else linear

"""Linear layers for serving, whose matrices lie in memory in the order in which the CPU reads them.

A matrix is cut into panels of 32 outputs, and a panel holds, input after input, one unit of 4 bytes (one
float32, two bfloat16, four int8) of each of its outputs: [panels, units, 32, numbers of a unit]. The C++
operator `penstock::linear` (nn/native/panels.h) reads it once for up to 14 tokens. Where that operator cannot
be had, or the CPU has matrix tiles (AMX), which PyTorch's oneDNN uses and we do not, oneDNN packs instead;
where neither applies a layer stays what it is.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.huge_pages import reserve
from penstock.nn import native

PANEL = 32
_UNIT_BYTES = 4
_CHUNK_ROWS = 4096
"""Rows that are converted or rounded at once, so that a large matrix is never held twice."""


def can_multiply(bits: int, device: torch.device) -> bool:
    """Return whether the C++ operators multiply by matrices of so many bits on a device."""
    return device.type == "cpu" and native.is_available() and bool(torch.ops.penstock.has_linear(bits))


def has_tiles() -> bool:
    """Return whether oneDNN multiplies bfloat16 by the matrix tiles of this CPU."""
    has_onednn: bool = torch._C._has_mkldnn
    return has_onednn and bool(torch.cpu._is_amx_tile_supported())


def row_chunks(num_rows: int) -> list[slice]:
    """Return slices of whole panels that cover all rows.

    >>> row_chunks(5000)
    [slice(0, 4096, None), slice(4096, 5000, None)]
    """
    return [slice(at, min(at + _CHUNK_ROWS, num_rows)) for at in range(0, num_rows, _CHUNK_ROWS)]


def empty_panels(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return zeros of the shape of panels, in huge pages where there are any."""
    numbers = _UNIT_BYTES // dtype.itemsize
    shape = (-(-outputs // PANEL), inputs // numbers, PANEL, numbers)
    size = shape[0] * inputs * PANEL
    return torch.frombuffer(reserve(size * dtype.itemsize), dtype=dtype, count=size).view(shape)


def fill_panels(panels: Tensor, rows: slice, matrix: Tensor) -> None:
    """Write rows of a matrix into their panels; `rows` begins with a panel."""
    first, count = rows.start // PANEL, -(-len(matrix) // PANEL)
    whole = functional.pad(matrix, (0, 0, 0, count * PANEL - len(matrix))).contiguous()
    units = whole.view(torch.int32).view(count, PANEL, -1)
    panels[first : first + count].view(torch.int32).squeeze(-1).copy_(units.transpose(1, 2))


def to_panels(matrix: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "panels units 32 numbers"]:
    """Return a copy of a matrix as panels; the last is filled up with zeros.

    >>> to_panels(torch.ones(40, 6)).shape
    torch.Size([2, 6, 32, 1])
    """
    panels = empty_panels(matrix.shape[0], matrix.shape[1], matrix.dtype)
    for rows in row_chunks(len(matrix)):
        fill_panels(panels, rows, matrix[rows])
    return panels


def from_panels(panels: Float[Tensor, "panels units 32 numbers"], outputs: int) -> Float[Tensor, "o i"]:
    """Return the matrix that panels hold."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:outputs]


class PackedLinear(nn.Module):
    """A linear layer over panels, float32 or bfloat16; takes the layer's place, and copies its matrix."""

    panels: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("panels", to_panels(linear.weight.detach()), persistent=False)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer; a token's result does not depend on the others."""
        out: Tensor = torch.ops.penstock.linear(x, self.panels, self.bias, self.out_features)
        return out


class TiledLinear(nn.Module):
    """A bfloat16 linear layer whose matrix oneDNN has put into its own order."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # no buffer: oneDNN's tensors cannot be moved or saved
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), 1)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._matrix, self._bias, "none", [], "")
        return out


def packed(linear: nn.Linear) -> nn.Module:
    """Return the fastest layer that computes the same on the matrix's device: perhaps the layer itself."""
    weight = linear.weight
    numbers = _UNIT_BYTES // weight.dtype.itemsize
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        return linear
    if weight.dtype == torch.bfloat16 and has_tiles():
        return TiledLinear(linear)
    if can_multiply(8 * weight.dtype.itemsize, weight.device) and linear.in_features % numbers == 0:
        return PackedLinear(linear)
    return linear

"""Numbers in fewer bits: blocks of 8-bit codes with a scale, and bfloat16 rounded at random.

Block-wise dynamic quantisation (Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR
2022): neighbours share a scale, their largest magnitude, and each is replaced by the nearest of 256
values that lie densest near zero. Blocks run along the last dimension and end with the row, so cutting a
matrix between its rows cuts no block: what a rank holds does not depend on how many ranks there are.

Stochastic rounding: a value goes up or down with the probability of its distance from the other
neighbour, so that the mean of many roundings is the value, where rounding to nearest would lose every
update smaller than half a step. The random bits come from the caller.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import BFloat16, Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional


def dynamic_map(*, signed: bool) -> list[float]:
    """Return the 256 values of the dynamic data type, ascending, in [-1, 1] or [0, 1].

    Seven decades; each finer one has half the values of the one above (Dettmers, arXiv:1511.04561,
    section 4). In each, the means of evenly spaced neighbours between 0.1 and 1 of the decade.

    >>> values = dynamic_map(signed=True)
    >>> len(values), values[0], values[127], values[-1]
    (256, -0.99296875, 0.0, 1.0)
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        means = [(0.1 + 0.9 * (i + 0.5) / count) * 10.0 ** (decade - 6) for i in range(count)]
        values += [*means, *(-mean for mean in means)] if signed else means
    return sorted(values)


@dataclass(frozen=True, slots=True)
class _Levels:
    """The values of a map, and what finds the nearest of them without a search."""

    values: Tensor
    """[256] float32."""
    borders: Tensor
    """[256] float32: above each value, where the next one is as near."""
    lowest: Tensor
    """[65536] int32: by the upper half of a float32, the code of the smallest number with that half."""


@cache
def _levels(signed: bool, device: torch.device) -> _Levels:
    values = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    between = ((values[1:] + values[:-1]) / 2).float()
    halves = torch.arange(2**16, dtype=torch.int32) << 16
    smallest = torch.where(halves < 0, halves | 0xFFFF, halves).view(torch.float32)
    lowest = torch.bucketize(smallest, between, out_int32=True, right=True)
    borders = torch.cat([between, torch.tensor([math.inf])])
    return _Levels(values.float().to(device), borders.to(device), lowest.to(device))


def _nearest(shares: Tensor, levels: _Levels) -> Tensor:
    """Return the codes [n] int32 of numbers [n] between -1 and 1.

    Values are so far apart that no two borders share the upper half of a float32: a look in a table and one
    comparison find what a binary search finds, in a tenth of its time.
    """
    code = levels.lowest.index_select(0, (shares.view(torch.int32) >> 16) & 0xFFFF)
    return code.add_(shares >= levels.borders.index_select(0, code))


def num_blocks(columns: int, block: int) -> int:
    """Return the blocks of a row; the last may be short.

    >>> num_blocks(129, 128)
    2
    """
    return -(-columns // block)


def to_codes(
    values: Float[Tensor, "rows columns"], *, block: int, signed: bool
) -> tuple[UInt8[Tensor, "rows columns"], Float[Tensor, "rows blocks"]]:
    """Return the codes and the float32 scales of a matrix; what is between two values goes to the nearer."""
    rows, columns = values.shape
    blocks = num_blocks(columns, block)
    padded = functional.pad(values, (0, blocks * block - columns)).view(rows, blocks, block)
    scales = padded.abs().amax(-1)
    shares = padded / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = _nearest(shares.flatten(), _levels(signed, values.device))
    return codes.to(torch.uint8).view(rows, blocks * block)[:, :columns], scales


def from_codes(
    codes: UInt8[Tensor, "rows columns"], scales: Float[Tensor, "rows blocks"], *, block: int, signed: bool
) -> Float[Tensor, "rows columns"]:
    """Return the float32 values that codes and scales stand for."""
    values = _levels(signed, codes.device).values
    shares = values.index_select(0, codes.flatten().int()).view(codes.shape)
    each = scales.repeat_interleave(block, dim=1)[:, : codes.shape[1]]
    return shares.mul_(each)


def code_of_zero(*, signed: bool) -> int:
    """Return the code of 0.

    >>> code_of_zero(signed=True), code_of_zero(signed=False)
    (127, 0)
    """
    return dynamic_map(signed=signed).index(0.0)


def round_stochastically(values: Float[Tensor, "n"], bits: Int64[Tensor, "n"]) -> BFloat16[Tensor, "n"]:
    """Round float32 to bfloat16, up with the probability of the part that is cut off.

    bfloat16 is the upper half of float32: a random number of 16 bits is added to the lower half, and
    the carry rounds up the magnitude. Values that bfloat16 holds are unchanged; the largest may become
    infinite.

    Args:
        bits: random; the lowest 16 are used.
    """
    raw = values.view(torch.int32)
    moved = (raw + (bits & 0xFFFF).int()) & ~0xFFFF
    return torch.where(values.isfinite(), moved, raw).view(torch.float32).bfloat16()

"""Rounding to fewer bits: blocks of 8-bit codes with a scale, int8 and int4 rows, stochastic bfloat16.

Block-wise dynamic quantisation (Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022):
neighbours share a scale, their largest magnitude, and each is replaced by the nearest of 256 values that are
densest near zero. Blocks run along the last dimension and end with the row, so sharding a matrix between its
rows cuts no block: a rank's codes do not depend on the number of ranks.

Stochastic rounding: a value is rounded up or down with a probability in proportion to its distance from the
other neighbour, so that the mean of many roundings is the value. Rounding to nearest would lose every update
smaller than half a step. The random bits are an argument.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import BFloat16, Float, Int8, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from penstock.nn.linear.adapter_config import GROUP


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
    """Values of a map, and a table for finding the nearest without a search."""

    values: Tensor
    """[256] float32."""
    borders: Tensor
    """[256] float32: the midpoint between each value and the next."""
    lowest: Tensor
    """[65536] int32: for each upper half of a float32, the code of the smallest number with that half."""


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

    No two borders share the upper half of a float32. So a table lookup and one comparison find the code in a
    tenth of the time of a binary search.
    """
    code = levels.lowest.index_select(0, (shares.view(torch.int32) >> 16) & 0xFFFF)
    return code.add_(shares >= levels.borders.index_select(0, code))


def num_blocks(columns: int, block: int) -> int:
    """Return the number of blocks of a row; the last may be short.

    >>> num_blocks(129, 128)
    2
    """
    return -(-columns // block)


def to_codes(
    values: Float[Tensor, "rows columns"], *, block: int, signed: bool
) -> tuple[UInt8[Tensor, "rows columns"], Float[Tensor, "rows blocks"]]:
    """Return the codes and the float32 scales of a matrix, rounded to nearest."""
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
    """Return the float32 values of codes and scales."""
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
    """Round float32 to bfloat16, up with a probability equal to the discarded fraction.

    bfloat16 is the upper half of float32: a random number of 16 bits is added to the lower half, and the
    carry rounds up the magnitude. Values that bfloat16 represents exactly are unchanged; the largest may
    become infinite.

    Args:
        bits: random; the lowest 16 are used.
    """
    raw = values.view(torch.int32)
    moved = (raw + (bits & 0xFFFF).int()) & ~0xFFFF
    return torch.where(values.isfinite(), moved, raw).view(torch.float32).bfloat16()


_CHUNK_ROWS = 4096
_LEAST = 1e-30
"""Smallest scale, for rows of zeros."""
_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Factors tried on the scale that fits the largest number; a smaller one clips it and is finer elsewhere."""


def to_int8(
    rows: Float[Tensor, "rows columns"], largest: Float[Tensor, "rows"] | None = None
) -> tuple[Int8[Tensor, "rows columns"], Float[Tensor, "rows"]]:
    """Round each row to integers from -127 to 127 times a scale.

    Args:
        largest: largest magnitude of each row, if `rows` has a part of the columns; None: it has all.

    >>> codes, scales = to_int8(torch.tensor([[0.5, -1.0]]))
    >>> codes.tolist(), round(float(scales), 5)
    ([[64, -127]], 0.00787)
    """
    numbers = rows.float()
    if largest is None:
        largest = numbers.abs().amax(-1)
    largest = largest.float().clamp(min=_LEAST)
    return (numbers * (127.0 / largest).unsqueeze(-1)).round_().to(torch.int8), largest / 127.0


def to_int4(
    rows: Float[Tensor, "rows columns"],
) -> tuple[UInt8[Tensor, "rows columns"], Float[Tensor, "rows groups"]]:
    """Round groups of a row to integers from -8 to 7, stored as 0 to 15, times a bfloat16 scale.

    The number of largest magnitude becomes -8, so a scale may be negative.
    """
    groups = rows.float().view(len(rows), -1, GROUP)
    top, bottom = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    extreme = torch.where(-bottom > top, bottom, top)
    extreme = torch.where(extreme.abs() < _LEAST, _LEAST, extreme)
    best_codes, best_scales, least = groups, extreme, torch.full_like(extreme, torch.inf)
    for share in _SHRUNK:
        scales = (extreme * (share / -8.0)).bfloat16().float()
        codes = (groups / scales).round_().clamp_(-8.0, 7.0)
        error = (codes * scales).sub_(groups).square_().sum(2, keepdim=True)
        is_better = error < least
        best_codes = torch.where(is_better, codes, best_codes)
        best_scales, least = torch.where(is_better, scales, best_scales), torch.minimum(error, least)
    return (best_codes + 8).to(torch.uint8).flatten(1), best_scales.squeeze(2).bfloat16()


def to_halves(codes: UInt8[Tensor, "rows columns"]) -> UInt8[Tensor, "rows half_columns"]:
    """Store two codes of 4 bits a byte: of each group the first half in the lower bits, the second above.

    So the columns of neighbouring bytes' lower (or upper) bits are neighbours too.
    """
    lower, upper = codes.view(len(codes), -1, 2, GROUP // 2).unbind(2)
    return (lower | upper << 4).flatten(1)


def from_halves(halves: UInt8[Tensor, "rows half_columns"]) -> UInt8[Tensor, "rows columns"]:
    """Return the codes that `to_halves` stored.

    >>> codes = torch.arange(16, dtype=torch.uint8).repeat(1, 2)
    >>> from_halves(to_halves(codes)).equal(codes)
    True
    """
    grouped = halves.view(len(halves), -1, GROUP // 2)
    return torch.stack([grouped & 15, grouped >> 4], 2).flatten(1)


def _to_halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = to_int4(rows)
    return to_halves(codes), scales


def _by_chunks(matrix: Tensor, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Round rows in chunks of `_CHUNK_ROWS`: in float32 a whole matrix may be larger than the model."""
    codes, scales = zip(*(rounded(rows) for rows in torch.split(matrix, _CHUNK_ROWS)), strict=True)
    return torch.cat(codes), torch.cat(scales)

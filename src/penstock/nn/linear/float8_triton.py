"""Rounding of rows to float8 in one Triton kernel, for GPUs: what `float8.scaled` does in ten of torch.

The numbers are the same to the bit: scales are powers of two, so one rounding happens. Integers round, as
Triton's interpreter, in which this is tested, converts to float8 otherwise than GPUs do. A row with a NaN has
another scale, and its products are NaN either way.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_COLUMNS = 1024
"""Columns of a turn."""


def rounded_rows(
    x: Float[Tensor, "rows columns"], multiple: int, *, largest_exponent: int, mantissa: int
) -> tuple[Tensor, Tensor]:
    """Return codes [rows, columns] float8_e4m3fn and scales [rows, 1] float32, as `float8.scaled` has them.

    Args:
        multiple: of it is the number of rows returned; those that `x` lacks are zeros.
        largest_exponent, mantissa: of the largest number of the dtype, as in float8.py.
    """
    rows = triton.cdiv(len(x), multiple) * multiple
    codes = torch.empty(rows, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, device=x.device)
    _round[(rows,)](
        x.contiguous(), codes.view(torch.uint8), scales, len(x), x.shape[1],
        EXPONENT=largest_exponent, MANTISSA=mantissa, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return codes, scales


@triton.jit(do_not_specialize=["num_rows"])
def _round(
    x, codes, scales, num_rows, num_columns,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Round one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    past = tl.where(row < num_rows, num_columns, 0)
    largest = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(0, num_columns, COLUMNS):
        i = first + column
        number = tl.load(x + row * num_columns + i, mask=i < past, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(number))
    bits = tl.max(largest, 0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32) - EXPONENT
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for first in range(0, num_columns, COLUMNS):
        i = first + column
        number = tl.load(x + row * num_columns + i, mask=i < past, other=0.0).to(tl.float32)
        tl.store(codes + row * num_columns + i, _code(number * factor), mask=i < num_columns)
    tl.store(scales + row, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def _code(number):
    """Return the e4m3 codes of float32 numbers as uint8, rounded to the nearest, halves to even."""
    bits = number.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # from 2 ** -6: 3 of 23 bits of the fraction are kept, and the exponent begins at -7 in place of -127
    normal = tl.minimum(((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3), 0x7E)
    normal = tl.where(size > 0x7F800000, 0x7F, normal)
    # below, codes count 2 ** -9: the last bit of a float32 between 2 ** 14 and 2 ** 15
    small = (tl.abs(number) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 31) & 1) << 7).to(tl.uint8)

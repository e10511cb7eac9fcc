"""Rounding of rows to float8 in one Triton kernel, for GPUs: what `float8.scaled` does in ten of torch.

The numbers are the same to the bit: scales are powers of two, so one rounding happens.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_COLUMNS = 1024
"""Columns of a turn."""


def rounded_rows(
    x: Float[Tensor, "rows columns"], *, largest_exponent: int, mantissa: int
) -> tuple[Tensor, Tensor]:
    """Return codes [rows, columns] float8_e4m3fn and exponents [rows, 1] uint8, as `float8.scaled` has them.

    Args:
        largest_exponent, mantissa: of the largest number of the dtype, as in float8.py.
    """
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    exponents = torch.empty(len(x), 1, dtype=torch.uint8, device=x.device)
    _round[(len(x),)](
        x.contiguous(), codes, exponents, x.shape[1],
        EXPONENT=largest_exponent, MANTISSA=mantissa, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return codes, exponents


@triton.jit
def _round(
    x, codes, exponents, num_columns,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Round one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    largest = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(0, num_columns, COLUMNS):
        i = first + column
        number = tl.load(x + row * num_columns + i, mask=i < num_columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(number))
    bits = tl.max(largest, 0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32) - EXPONENT
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for first in range(0, num_columns, COLUMNS):
        i = first + column
        number = tl.load(x + row * num_columns + i, mask=i < num_columns, other=0.0).to(tl.float32)
        tl.store(codes + row * num_columns + i, (number * factor).to(tl.float8e4nv), mask=i < num_columns)
    tl.store(exponents + row, exponent.to(tl.uint8))

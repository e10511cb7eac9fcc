"""Rows of pages, a key or a value each: of the model's type as they are, or rounded to 8 bits.

A row of 8 bits is head_dim codes from -127 to 127 and behind them its scale, a float32, in four bytes of one
int8 tensor: a page stays one piece of memory, read in one stream. The scale belongs to one head of one token,
so what a token becomes depends on no other, nor on the step it came in.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from penstock.nn.quantized import to_int8

SCALE_SIZE = 4
"""Bytes of a scale; head dims must be multiples of it."""


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many numbers of its type a row has.

    >>> row_size(64, torch.bfloat16), row_size(64, torch.int8)
    (64, 68)
    """
    return head_dim + SCALE_SIZE if dtype == torch.int8 else head_dim


def dim_of(pages: Tensor) -> int:
    """Return the head dim of pages [..., row]."""
    return pages.shape[-1] - SCALE_SIZE if pages.dtype == torch.int8 else pages.shape[-1]


def to_rows(x: Float[Tensor, "... d"], dtype: torch.dtype) -> Tensor:
    """Return what pages of that type hold of keys or values, [..., row]."""
    if dtype != torch.int8:
        return x.to(dtype)
    codes, scales = to_int8(x)
    return torch.cat((codes, scales.unsqueeze(-1).view(torch.int8)), -1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Float[Tensor, "... d"]:
    """Return the keys or values that rows of pages stand for."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    codes, scales = rows[..., :-SCALE_SIZE], scales_of(rows)[..., -1:]
    return (codes.float() * scales).to(dtype)


def scales_of(rows: Int8[Tensor, "... row"]) -> Float[Tensor, "... quarter_row"]:
    """Return the same memory as float32, where the last of each row is its scale."""
    return rows.view(torch.float32)

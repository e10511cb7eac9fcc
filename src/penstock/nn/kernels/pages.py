"""Layout of pages: rows that hold one key or value each, and the token positions of a step (`PagedStep`).

A row has the model's dtype, or 8 bits: head_dim codes from -127 to 127, then their float32 scale in four
bytes of the same int8 tensor, so that a page is contiguous and read in one stream. The scale belongs to one
head of one token, so the codes of a token depend on no other token and on no step.

Legend: t tokens, s shares, w blocks of the longest table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from jaxtyping import Float, Int8, Int32, Int64
from torch import Tensor

from penstock.nn.linear.rounding import to_int8
from penstock.nn.upload import uploaded

SCALE_SIZE = 4
"""Bytes of a scale; head dims must be multiples of it."""


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return the length of a row, in elements of its dtype.

    >>> row_size(64, torch.bfloat16), row_size(64, torch.int8)
    (64, 68)
    """
    return head_dim + SCALE_SIZE if dtype == torch.int8 else head_dim


def dim_of(pages: Tensor) -> int:
    """Return the head dim of pages [..., row]."""
    return pages.shape[-1] - SCALE_SIZE if pages.dtype == torch.int8 else pages.shape[-1]


def to_rows(x: Float[Tensor, "... d"], dtype: torch.dtype) -> Tensor:
    """Return keys or values as rows of pages of that dtype, [..., row]."""
    if dtype != torch.int8:
        return x.to(dtype)
    codes, scales = to_int8(x)
    return torch.cat((codes, scales.unsqueeze(-1).view(torch.int8)), -1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Float[Tensor, "... d"]:
    """Return the keys or values of rows of pages."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    codes, scales = rows[..., :-SCALE_SIZE], scales_of(rows)[..., -1:]
    return (codes.float() * scales).to(dtype)


def scales_of(rows: Int8[Tensor, "... row"]) -> Float[Tensor, "... quarter_row"]:
    """Return a float32 view of the rows; the last number of each row is its scale."""
    return rows.view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """Sequences, positions and cache slots of the tokens of one step; tensors on the model's device."""

    slots: Int64[Tensor, "t"]
    """Slot of each token's key and value: block * block_size + offset."""
    query_starts: Int32[Tensor, "s_plus_1"]
    """Share i is tokens query_starts[i] to query_starts[i + 1]."""
    lengths: Int32[Tensor, "s"]
    """Number of keys that the last query of each share sees, its own included."""
    block_tables: Int32[Tensor, "s w"]
    """Blocks of each share's sequence; shorter tables are padded with any block."""
    spans: tuple[tuple[int, int, int], ...]
    """(first token, end, length) of each share, for code that runs on the host."""
    num_singles: int
    """Number of shares at the front that have one token each."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Operation of paged.py -> name of its kernel; those that are missing: the first of each."""

    @classmethod
    def from_arrays(
        cls,
        *,
        slots: np.ndarray,
        query_starts: np.ndarray,
        lengths: np.ndarray,
        block_tables: np.ndarray,
        device: torch.device,
    ) -> Self:
        """Copy the integers of a step to the device (on CPUs the arrays are shared, not copied)."""
        tensors = uploaded((slots, query_starts, lengths, block_tables), device)
        return cls.from_uploaded(tensors, query_starts=query_starts, lengths=lengths)

    @classmethod
    def from_uploaded(
        cls, tensors: Sequence[Tensor], *, query_starts: np.ndarray, lengths: np.ndarray
    ) -> Self:
        """Return a step of slots, query_starts, lengths and block_tables that are on the device."""
        many = np.flatnonzero(np.diff(query_starts) != 1)
        starts = query_starts.tolist()
        return cls(
            slots=tensors[0],
            query_starts=tensors[1],
            lengths=tensors[2],
            block_tables=tensors[3],
            spans=tuple(zip(starts, starts[1:], lengths.tolist(), strict=False)),
            num_singles=int(many[0]) if len(many) else len(lengths),
        )

    def singles(self) -> Self:
        """Return the step of the shares at the front that have one token each; slots stay."""
        many = self.num_singles
        return replace(
            self,
            query_starts=self.query_starts[: many + 1],
            lengths=self.lengths[:many],
            block_tables=self.block_tables[:many],
            spans=self.spans[:many],
        )

    def others(self) -> Self:
        """Return the step of the other shares; tokens are counted from the first of them, and slots stay."""
        past = self.num_singles
        return replace(
            self,
            query_starts=self.query_starts[past:] - past,
            lengths=self.lengths[past:],
            block_tables=self.block_tables[past:],
            spans=tuple((first - past, end - past, length) for first, end, length in self.spans[past:]),
            num_singles=0,
        )

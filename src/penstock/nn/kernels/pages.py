"""Layout of pages, which hold keys or values, and the token positions of a step (`PagedStep`).

A page holds `block_size` positions of one head in the model's dtype, or in 8 bits: the codes of all
positions, from -127 to 127, then a float32 scale for each.

    [c c c ... c] [c c c ... c] ... | s s ...     block_size x d bytes, then block_size x 4 bytes

So codes are aligned as numbers of the model's dtype are, a kernel reads 16 at once, and a page is one piece
of memory (docs/adr/0089-scales-at-the-end-of-a-page.md). The scale belongs to one head of one token, so the
codes of a token depend on no other token and on no step.

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


def page_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the numbers that a position takes in a page, the last dimension of a tensor of pages.

    >>> page_width(64, torch.bfloat16), page_width(64, torch.int8)
    (64, 68)
    """
    return head_dim + SCALE_SIZE if dtype == torch.int8 else head_dim


def dim_of(pages: Tensor) -> int:
    """Return the head dim of pages [..., width]."""
    return pages.shape[-1] - SCALE_SIZE if pages.dtype == torch.int8 else pages.shape[-1]


def codes_of(pages: Int8[Tensor, "... block_size width"]) -> Int8[Tensor, "... block_size d"]:
    """Return the codes of pages of 8 bits, as a view."""
    block_size, head_dim = pages.shape[-2], dim_of(pages)
    return pages.flatten(-2)[..., : block_size * head_dim].view(*pages.shape[:-1], head_dim)


def scales_of(pages: Int8[Tensor, "... block_size width"]) -> Float[Tensor, "... block_size"]:
    """Return the scales of pages of 8 bits, as a float32 view."""
    return pages.flatten(-2).view(torch.float32)[..., -pages.shape[-2] :]


def to_pages(x: Float[Tensor, "... block_size d"], dtype: torch.dtype) -> Tensor:
    """Return keys or values as pages of that dtype, [..., block_size, width]."""
    if dtype != torch.int8:
        return x.to(dtype)
    pages = x.new_empty(*x.shape[:-1], page_width(x.shape[-1], dtype), dtype=dtype)
    codes, scales = to_int8(x)
    codes_of(pages).copy_(codes)
    scales_of(pages).copy_(scales)
    return pages


def from_pages(pages: Tensor, dtype: torch.dtype) -> Float[Tensor, "... block_size d"]:
    """Return the keys or values of whole pages [..., block_size, width]."""
    if pages.dtype != torch.int8:
        return pages.to(dtype)
    return _widened(codes_of(pages), scales_of(pages), dtype)


def write(pages: Tensor, slots: Int64[Tensor, "t"], x_tkd: Float[Tensor, "t k d"]) -> None:
    """Write the key or value of each token to its slot of pages [blocks, k, block_size, width]."""
    block_size = pages.shape[2]
    at = slots // block_size, slice(None), slots % block_size
    if pages.dtype != torch.int8:
        pages[at] = x_tkd.to(pages.dtype)
        return
    codes, scales = to_int8(x_tkd)
    codes_of(pages)[at], scales_of(pages)[at] = codes, scales


def read(pages: Tensor, slots: Int64[Tensor, "t"], dtype: torch.dtype) -> Float[Tensor, "t k d"]:
    """Return the key or value of each slot of pages [blocks, k, block_size, width]."""
    block_size = pages.shape[2]
    at = slots // block_size, slice(None), slots % block_size
    if pages.dtype != torch.int8:
        return pages[at].to(dtype)
    return _widened(codes_of(pages)[at], scales_of(pages)[at], dtype)


def _widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times scales, rounded from float32; no intermediate tensor."""
    out = torch.empty_like(codes, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.mul(codes, scales.unsqueeze(-1), out=out)


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
    """Operation of paged.py -> name of its kernel; those that are missing: Triton."""

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
        tensors = uploaded((slots[None], query_starts, lengths, block_tables[None]), device)
        return cls.from_uploaded(tensors, query_starts=query_starts, lengths=lengths)[0]

    @classmethod
    def from_uploaded(
        cls, tensors: Sequence[Tensor], *, query_starts: np.ndarray, lengths: np.ndarray
    ) -> list[Self]:
        """Return the step of each cache group, of tensors that are on the device.

        Args:
            tensors: slots [g, t], query_starts, lengths and block_tables [g, s, w].
        """
        many = np.flatnonzero(np.diff(query_starts) != 1)
        starts = query_starts.tolist()
        spans = tuple(zip(starts, starts[1:], lengths.tolist(), strict=False))
        num_singles = int(many[0]) if len(many) else len(lengths)
        return [
            cls(
                slots=slots,
                query_starts=tensors[1],
                lengths=tensors[2],
                block_tables=tables,
                spans=spans,
                num_singles=num_singles,
            )
            for slots, tables in zip(tensors[0].unbind(), tensors[3].unbind(), strict=True)
        ]

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

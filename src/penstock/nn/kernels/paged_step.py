"""Whose the tokens of a step are, for attention over pages; the tokens are laid one after the other.

Legend: t tokens, s shares, w blocks of the longest table.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """Whose the tokens of one step are, and where their keys and values go; tensors where the model is."""

    slots: Int64[Tensor, "t"]
    """Where each token's key and value go: block * block_size + offset."""
    query_starts: Int32[Tensor, "s_plus_1"]
    """Share i is tokens query_starts[i] to query_starts[i + 1]."""
    lengths: Int32[Tensor, "s"]
    """Keys that the last query of each share sees, its own included."""
    block_tables: Int32[Tensor, "s w"]
    """Filled up with any block."""
    spans: tuple[tuple[int, int, int], ...]
    """First token, past the last, and length of each share again, for code that runs on the host."""
    num_singles: int
    """Shares at the front that have one token each."""

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
        """Copy the integers of a step to the device (arrays shared, not copied, on CPUs)."""
        tensors = (
            torch.from_numpy(array).to(device, non_blocking=True)
            for array in (slots, query_starts, lengths, np.ascontiguousarray(block_tables))
        )
        many = np.flatnonzero(np.diff(query_starts) != 1)
        starts = query_starts.tolist()
        return cls(
            **dict(zip(("slots", "query_starts", "lengths", "block_tables"), tensors, strict=True)),
            spans=tuple(zip(starts, starts[1:], lengths.tolist(), strict=False)),
            num_singles=int(many[0]) if len(many) else len(lengths),
        )

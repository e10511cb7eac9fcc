"""A step as arrays of integers, which is all that the ranks of a model need to be told; no torch.

Legend: t tokens of the step, s shares, w blocks of the longest table, r rows whose logits are needed.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens of all shares one after the other."""

    token_ids: np.ndarray
    """[t] int64."""
    positions: np.ndarray
    """[t] int64, counted from each sequence's start."""
    slots: np.ndarray
    """[t] int64: where keys and values go, block * block_size + offset."""
    query_starts: np.ndarray
    """[s + 1] int32: share i is tokens query_starts[i] to query_starts[i + 1]."""
    lengths: np.ndarray
    """[s] int32: keys that the last query of each share sees, its own included."""
    block_tables: np.ndarray
    """[s, w] int32, filled up with 0."""
    logit_rows: np.ndarray
    """[r] int64: tokens of the step whose logits are needed, ascending: the last of each share that
    samples, and with drafts also those before each of them."""
    adapters: np.ndarray
    """[s] int32: index of each share's adapter; -1: none."""

    @property
    def num_singles(self) -> int:
        """Shares at the front that have one token each."""
        sizes = np.diff(self.query_starts)
        return int(np.argmax(sizes != 1)) if (sizes != 1).any() else len(sizes)

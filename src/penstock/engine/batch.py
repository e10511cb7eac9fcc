"""A step as arrays of integers, which is all that the ranks of a model need to be told; no torch.

Legend: t tokens of the step, s shares, w blocks of the longest table, r rows whose logits are needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

import numpy as np

from penstock.engine.step_plan import Share, StepPlan

NO_ADAPTERS: Mapping[str, int] = MappingProxyType({})


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
    samples, with drafts also those before each of them, and where they are asked for those of a prompt."""
    adapters: np.ndarray
    """[s] int32: index of each share's adapter; -1: none."""
    vector_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[v] int64: tokens whose hidden states are needed, beside those of `logit_rows`."""

    @property
    def num_singles(self) -> int:
        """Shares at the front that have one token each."""
        sizes = np.diff(self.query_starts)
        return int(np.argmax(sizes != 1)) if (sizes != 1).any() else len(sizes)


def batch_of(plan: StepPlan, block_size: int, *, adapters: Mapping[str, int] = NO_ADAPTERS) -> Batch:
    """Write a plan with at least one share as arrays.

    Args:
        adapters: name of a request's adapter -> its index.
    """
    shares = plan.shares
    starts = np.array([share.start for share in shares], np.int64)
    sizes = np.array([share.num_tokens for share in shares], np.int64)
    query_starts = np.zeros(len(shares) + 1, np.int64)
    sizes.cumsum(out=query_starts[1:])
    owner = np.repeat(np.arange(len(shares)), sizes)
    positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[owner]
    tables = _block_tables(shares)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Batch(
        token_ids=_token_ids(shares),
        positions=positions,
        slots=slots,
        query_starts=query_starts.astype(np.int32),
        lengths=(starts + sizes).astype(np.int32),
        block_tables=tables,
        logit_rows=_logit_rows(shares, query_starts[1:]),
        adapters=np.array(
            [adapters.get(share.sequence.request.adapter or "", -1) for share in shares], np.int32
        ),
        vector_rows=query_starts[1:][[share.embeds for share in shares]] - 1,
    )


def _token_ids(shares: tuple[Share, ...]) -> np.ndarray:
    runs = (
        chain(share.sequence.tokens[share.start : share.start + share.num_tokens], share.drafts)
        for share in shares
    )
    return np.fromiter(chain.from_iterable(runs), np.int64)


def _block_tables(shares: tuple[Share, ...]) -> np.ndarray:
    # one copy per row: np.asarray reads an array("i") as it is, where a list is converted number by number
    rows = [np.asarray(share.sequence.blocks, np.int32) for share in shares]
    tables = np.zeros((len(rows), max(len(row) for row in rows)), np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return tables


def _logit_rows(shares: tuple[Share, ...], ends: np.ndarray) -> np.ndarray:
    counts = np.array([share.num_rows for share in shares], np.int64)
    before = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    rows: np.ndarray = np.repeat(ends - counts, counts) + before
    scored = [
        np.arange(len(share.scored)) + end - share.num_tokens
        for share, end in zip(shares, ends, strict=True)
        if share.scored
    ]
    return np.sort(np.concatenate([rows, *scored])) if scored else rows

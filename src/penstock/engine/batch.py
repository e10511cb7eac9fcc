"""A step as arrays of integers, which is all that the ranks of a model need to be told; no torch.

Legend: t tokens of the step, s shares, w blocks of the longest table, r rows whose logits are needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from penstock.engine.scheduling.step_plan import Share, StepPlan

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
    # lists first: of a few shares, each call of numpy costs more than all that it computes, above all in the
    # cold caches that a step of the network leaves behind
    ids: list[int] = []
    positions: list[int] = []
    ends = [0]
    logit_rows: list[int] = []
    vector_rows: list[int] = []
    for share in plan.shares:
        first, past = len(ids), share.start + share.num_tokens
        ids += share.sequence.tokens[share.start : past]
        ids += share.drafts
        positions += range(share.start, past)
        end = len(ids)
        ends.append(end)
        logit_rows += range(first, first + len(share.scored))
        logit_rows += range(end - share.num_rows, end)
        if share.embeds:
            vector_rows.append(end - 1)
    return Batch(
        token_ids=np.array(ids, np.int64),
        positions=np.array(positions, np.int64),
        slots=np.array(_slots(plan.shares, block_size), np.int64),
        query_starts=np.array(ends, np.int32),
        lengths=np.array([share.start + share.num_tokens for share in plan.shares], np.int32),
        block_tables=_block_tables(plan.shares),
        logit_rows=np.array(logit_rows, np.int64),
        adapters=np.array(
            [adapters.get(share.sequence.request.adapter or "", -1) for share in plan.shares], np.int32
        ),
        vector_rows=np.array(vector_rows, np.int64),
    )


def _slots(shares: tuple[Share, ...], block_size: int) -> list[int]:
    return [
        share.sequence.blocks[position // block_size] * block_size + position % block_size
        for share in shares
        for position in range(share.start, share.start + share.num_tokens)
    ]


def _block_tables(shares: tuple[Share, ...]) -> np.ndarray:
    tables = np.zeros((len(shares), max(len(share.sequence.blocks) for share in shares)), np.int32)
    for table, share in zip(tables, shares, strict=True):
        table[: len(share.sequence.blocks)] = share.sequence.blocks  # an array("i") is copied as it is
    return tables

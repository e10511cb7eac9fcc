"""Batch of one step as integer arrays, and its serialisation for the other ranks; no torch.

Legend: t tokens of the step, s shares, w blocks of the longest block table, r rows whose logits are needed,
g cache groups (scheduling/groups.py).

Each serialised array has a header of five integers (item size in bytes, dims, size of the first three dims)
and begins at a multiple of 8 bytes, so that the receiver's arrays are views of the message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from types import MappingProxyType

import numpy as np

from penstock.engine.scheduling.sequence import ScheduledTokens, StepPlan

Blocks = Sequence[int]
NO_ADAPTERS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Tokens of all shares, concatenated."""

    token_ids: np.ndarray
    """[t] int64; ~r, which is negative: the token that the step before sampled in row r and the host has not
    read."""
    positions: np.ndarray
    """[t] int64, position of each token in its sequence, from 0."""
    slots: np.ndarray
    """[g, t] int64: cache slot of each token's key and value, block * block_size + offset."""
    query_starts: np.ndarray
    """[s + 1] int32: share i has the tokens query_starts[i] to query_starts[i + 1]."""
    lengths: np.ndarray
    """[s] int32: keys that the last query of each share attends to, its own included."""
    block_tables: np.ndarray
    """[g, s, w] int32, padded with 0; entries of blocks that no token of the share sees are stale."""
    logit_rows: np.ndarray
    """[r] int64: tokens whose logits are needed, ascending: the last token of each share that samples, each
    token before a draft, and prompt tokens whose log-probabilities were requested."""
    adapters: np.ndarray
    """[s] int32: adapter index of each share; -1: no adapter."""
    vector_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[v] int64: further tokens whose hidden states are needed, for embeddings."""

    @property
    def num_singles(self) -> int:
        """Number of leading shares with exactly one token."""
        sizes = np.diff(self.query_starts)
        return int(np.argmax(sizes != 1)) if (sizes != 1).any() else len(sizes)


def batch_of(plan: StepPlan, block_size: int, *, adapters: Mapping[str, int] = NO_ADAPTERS) -> StepBatch:
    """Convert a plan with at least one share to arrays.

    Args:
        adapters: adapter name -> index.
    """
    # lists first: for a few shares a numpy call costs more than its work, most of all with the cold caches
    # that a forward pass leaves behind
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
        if scored := share.scored:
            logit_rows += range(first + scored.start - share.start, first + scored.stop - share.start)
        logit_rows += range(end - share.num_rows, end)
        if share.embeds:
            vector_rows.append(end - 1)
    num_groups = len(plan.shares[0].sequence.tables)
    groups = [[share.sequence.tables[group].blocks for share in plan.shares] for group in range(num_groups)]
    return StepBatch(
        token_ids=np.array(ids, np.int64),
        positions=np.array(positions, np.int64),
        slots=np.array([_slots(plan.shares, blocks, block_size) for blocks in groups], np.int64),
        query_starts=np.array(ends, np.int32),
        lengths=np.array([share.start + share.num_tokens for share in plan.shares], np.int32),
        block_tables=_block_tables(groups),
        logit_rows=np.array(logit_rows, np.int64),
        adapters=np.array(
            [adapters.get(share.sequence.request.adapter or "", -1) for share in plan.shares], np.int32
        ),
        vector_rows=np.array(vector_rows, np.int64),
    )


def _slots(shares: tuple[ScheduledTokens, ...], blocks: Sequence[Blocks], block_size: int) -> list[int]:
    return [
        own[position // block_size] * block_size + position % block_size
        for share, own in zip(shares, blocks, strict=True)
        for position in range(share.start, share.start + share.num_tokens)
    ]


def _block_tables(groups: Sequence[Sequence[Blocks]]) -> np.ndarray:
    width = max(len(own) for blocks in groups for own in blocks)
    tables = np.zeros((len(groups), len(groups[0]), width), np.int32)
    for group, blocks in zip(tables, groups, strict=True):
        for table, own in zip(group, blocks, strict=True):
            table[: len(own)] = own  # an array("i") is copied as it is
    return tables


_NAMES = tuple(field.name for field in fields(StepBatch))
_TYPES: dict[int, np.dtype[np.signedinteger]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}
_ALIGNED = 8
_MAX_DIMS = 3


def encode(batch: StepBatch) -> bytes:
    """Serialise a batch.

    >>> none = np.zeros(0, np.int64)
    >>> batch = StepBatch(**{**dict.fromkeys(_NAMES, none), "token_ids": np.array([7, 8])})
    >>> decode(bytearray(encode(batch))).token_ids.tolist()
    [7, 8]
    """
    arrays = [np.ascontiguousarray(getattr(batch, name)) for name in _NAMES]
    head = [(a.itemsize, a.ndim, *a.shape, *(1,) * (_MAX_DIMS - a.ndim)) for a in arrays]
    padded = (array.tobytes() + bytes(-array.nbytes % _ALIGNED) for array in arrays)
    return b"".join((np.array(head, np.int64).tobytes(), *padded))


def decode(content: bytearray | memoryview) -> StepBatch:
    """Return the batch serialised by `encode`; its arrays are views of `content`, which must be writable."""
    head = np.frombuffer(content, np.int64, count=(2 + _MAX_DIMS) * len(_NAMES)).reshape(-1, 2 + _MAX_DIMS)
    arrays, start = {}, head.nbytes
    for name, (size, dims, *shape) in zip(_NAMES, head.tolist(), strict=True):
        flat = np.frombuffer(content, _TYPES[size], count=prod(shape), offset=start)
        arrays[name] = flat.reshape(shape[:dims])
        start += flat.nbytes + -flat.nbytes % _ALIGNED
    return StepBatch(**arrays)

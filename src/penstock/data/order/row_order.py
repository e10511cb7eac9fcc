"""Row order of one corpus: sample index -> epoch, pool, lane and row, in closed form.

An epoch of a token space of T tokens, for sequences of L tokens:

    blocks   [0, T) cut into blocks of B tokens, which are permuted (see permutation.py)
    pools    K consecutive permuted blocks; documents are shuffled and packed inside a pool
    lanes    V pools are read side by side, round robin, so a batch draws on V*K random blocks

Nothing is built, stored or scanned, and nothing depends on the number of ranks.

With the packing "whole" (see pool.py) rows are padded, so the rows of each pool must be counted. Its blocks
are then the same in every epoch, and so is the count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.rng import key_of
from penstock.data.order.permutation import Blocks, Geometry
from penstock.data.order.round_robin import RoundRobin
from penstock.data.types import Waste


@dataclass(frozen=True, slots=True)
class RowAddresses:
    """Addresses of samples of one corpus; all arrays are [n] int64."""

    epoch: Int64
    pool: Int64
    lane: Int64
    row: Int64
    """Row inside the pool."""

    def take(self, indices: Int64) -> "RowAddresses":
        """Return the addresses at the given indices."""
        return RowAddresses(self.epoch[indices], self.pool[indices], self.lane[indices], self.row[indices])

    def put(self, indices: Int64, addresses: "RowAddresses") -> None:
        """Overwrite the addresses at the given indices."""
        self.epoch[indices], self.pool[indices] = addresses.epoch, addresses.pool
        self.lane[indices], self.row[indices] = addresses.lane, addresses.row


@dataclass(frozen=True, slots=True)
class RepackPoint:
    """A change of the sequence length in the middle of a pool."""

    sequence_length: int
    """Sequence length before the change."""
    rows: int
    """Rows of that length consumed from the pool."""


class Counter(Protocol):
    """Counts the rows of pools if the number of tokens does not determine it."""

    def rows(self, order: "Order") -> Int64:
        """Return the rows of every pool, valid in any epoch."""

    def rows_left(self, order: "Order", epoch: int, pool: int, repacks: Sequence[RepackPoint]) -> int:
        """Return the number of rows that the rest of a pool fills."""

    def waste(self, order: "Order", pools: int) -> Waste:
        """Return the waste of the first `pools` pools, valid in any epoch."""

    def waste_in(
        self, order: "Order", epoch: int, pool: int, rows: int, repacks: Sequence[RepackPoint]
    ) -> Waste:
        """Return the waste of the first rows of a pool, minus what earlier length changes counted."""


class Order:
    """Shuffled row order of one token space over all epochs.

    Args:
        name: the corpus's name in the mixture; with the seed it keys every permutation.
        counter: counts the rows of pools; None: rows are full, so their number follows from the tokens.
    """

    def __init__(
        self, num_tokens: int, geometry: Geometry, *, name: str, seed: int, counter: Counter | None = None
    ) -> None:
        self.num_tokens = num_tokens
        self.geometry = geometry
        self.name = name
        self.counter = counter
        sizes = (geometry.sequence_length, geometry.block_tokens, geometry.blocks_per_pool, geometry.lanes)
        self.identity = f"{name} {num_tokens} {sizes}"
        """Key of the order, unique among orders of the corpus. A string, because strings cache their hash."""
        self._seed = seed
        self.num_pools = -(-num_tokens // geometry.pool_tokens)
        self._last_group = (self.num_pools - 1) // geometry.lanes
        self.blocks = Blocks(num_tokens, geometry, key=self.key, same=counter is not None)
        self._counted_turns = lru_cache(maxsize=4)(self._turns)

    @cached_property
    def samples_per_epoch(self) -> int:
        """Rows of one epoch."""
        if self.counter is not None:
            return int(self._firsts[-1])
        last = self.num_pools - 1
        return last * self.geometry.rows_per_pool + self.rows_in_pool(last)

    @cached_property
    def _rows(self) -> Int64:
        assert self.counter is not None
        return self.counter.rows(self)

    @cached_property
    def _firsts(self) -> Int64:
        """First sample of each group of counted pools, then the samples of an epoch: [groups + 1]."""
        groups = np.add.reduceat(self._rows, np.arange(0, self.num_pools, self.geometry.lanes))
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(groups)))

    @cached_property
    def _even_turns(self) -> RoundRobin:
        return RoundRobin([self.geometry.rows_per_pool] * self.geometry.lanes)

    @cached_property
    def _last_turns(self) -> RoundRobin:
        return self._turns(self._last_group)

    def _turns(self, group: int) -> RoundRobin:
        return RoundRobin([self.rows_in_pool(pool) for pool in self.pools_of(group)])

    def at_length(self, sequence_length: int) -> "Order":
        """Return the order of the same pools, cut into rows of another length."""
        geometry = replace(self.geometry, sequence_length=sequence_length)
        return Order(self.num_tokens, geometry, name=self.name, seed=self._seed, counter=self.counter)

    def key(self, purpose: str, epoch: int, *ids: int) -> int:
        """Return the key of a random choice in an epoch of this corpus."""
        return key_of(self._seed, purpose, self.name, epoch, *ids)

    def tokens_in_pool(self, pool: int) -> int:
        """Return the tokens of a pool: K * B; fewer in the last one."""
        return min(self.geometry.pool_tokens, self.num_tokens - pool * self.geometry.pool_tokens)

    def rows_in_pool(self, pool: int) -> int:
        """Return the rows of a pool: n, fewer in the last one; the counted number with packing "whole"."""
        if self.counter is not None:
            return int(self._rows[pool])
        return -(-self.tokens_in_pool(pool) // self.geometry.sequence_length)

    def rows_left(self, epoch: int, pool: int, repacks: Sequence[RepackPoint]) -> int:
        """Return the number of rows that the rest of a pool fills after sequence-length changes."""
        if self.counter is not None:
            return self.counter.rows_left(self, epoch, pool, repacks)
        return -(-self._tokens_left(pool, repacks) // self.geometry.sequence_length)

    def _tokens_left(self, pool: int, repacks: Sequence[RepackPoint]) -> int:
        tokens = self.tokens_in_pool(pool)
        for repack in repacks:  # only the last row of each length may be short
            tokens -= min(tokens, repack.rows * repack.sequence_length)
        return tokens

    def waste(self, pools: int) -> Waste:
        """Return the waste of the first `pools` pools, valid in any epoch."""
        if self.counter is not None:
            return self.counter.waste(self, pools)
        tokens = min(pools * self.geometry.pool_tokens, self.num_tokens)
        rows = sum(self.rows_in_pool(pool) for pool in {self.num_pools - 1} & {pools - 1})
        rows += min(pools, self.num_pools - 1) * self.geometry.rows_per_pool
        return Waste(padding=rows * self.geometry.sequence_length - tokens)

    def waste_in(self, epoch: int, pool: int, rows: int, repacks: Sequence[RepackPoint] = ()) -> Waste:
        """Return the waste of the first rows of a pool."""
        if self.counter is not None:
            return self.counter.waste_in(self, epoch, pool, rows, repacks)
        if rows < self.rows_left(epoch, pool, repacks):  # only the last row may be short
            return Waste()
        return Waste(padding=rows * self.geometry.sequence_length - self._tokens_left(pool, repacks))

    def pools_of(self, group: int) -> range:
        """Return the pools of a group: those read side by side."""
        lanes = self.geometry.lanes
        return range(group * lanes, min((group + 1) * lanes, self.num_pools))

    def turns_of(self, group: int) -> RoundRobin:
        """Return the round robin over the lanes of a group."""
        if self.counter is not None:
            return self._counted_turns(group)
        return self._last_turns if group == self._last_group else self._even_turns

    def first_of(self, group: int) -> int:
        """Return the first sample of a group of pools within its epoch."""
        if self.counter is not None:
            return int(self._firsts[group])
        return group * self.geometry.lanes * self.geometry.rows_per_pool

    def group_of(self, sample: int) -> int:
        """Return the group of pools that contains a sample of an epoch."""
        if self.counter is not None:
            return int(np.searchsorted(self._firsts, sample, side="right")) - 1
        return sample // (self.geometry.lanes * self.geometry.rows_per_pool)

    def locate(self, samples: Int64) -> RowAddresses:
        """Return the addresses of samples [n] int64, numbered over all epochs of this corpus."""
        if self.counter is not None:
            return self._located(samples)
        n, lanes = self.geometry.rows_per_pool, self.geometry.lanes
        epoch, k = np.divmod(samples, self.samples_per_epoch)
        group, inside = np.divmod(k, lanes * n)
        row, lane = np.divmod(inside, lanes)
        last = group == self._last_group
        if last.any():
            lane[last], row[last] = self._last_turns.locate(inside[last])
        return RowAddresses(epoch=epoch, pool=group * lanes + lane, lane=lane, row=row)

    def _located(self, samples: Int64) -> RowAddresses:
        """Return the addresses of samples [n] where rows are counted."""
        epoch, k = np.divmod(samples, self.samples_per_epoch)
        group = np.searchsorted(self._firsts, k, side="right") - 1
        lane, row = np.empty_like(samples), np.empty_like(samples)
        for each in np.unique(group).tolist():
            chosen = group == each
            lane[chosen], row[chosen] = self.turns_of(each).locate(k[chosen] - self._firsts[each])
        return RowAddresses(epoch=epoch, pool=group * self.geometry.lanes + lane, lane=lane, row=row)

    def sample_of(self, epoch: int, pool: int, row: int) -> int:
        """Return the sample at a row address: the inverse of `locate`."""
        group, lane = divmod(pool, self.geometry.lanes)
        before = epoch * self.samples_per_epoch + self.first_of(group)
        return before + self.turns_of(group).sample_of(lane, row)

"""Sample index -> epoch, pool, lane and row: the shuffle, as arithmetic.

An epoch of a token space of T tokens, for sequences of L tokens:

    blocks   [0, T) cut into blocks of B tokens; full blocks are permuted, the partial one comes last
    pools    K consecutive permuted blocks; documents are shuffled and packed inside a pool
    lanes    V pools are consumed side by side, round robin, so a batch draws on V*K random blocks

Everything here is closed form in the sample index: nothing is built, stored or scanned, and nothing
depends on the number of ranks. From the second epoch on the block grid is rotated by a keyed offset
(positions modulo T), so that block edges cut other documents each time.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.core.rng import key_of
from penstock.data.permutation import Permutation
from penstock.data.types import Int64

_BLOCK_ROWS = 256
_MIN_BLOCK_ROWS = 16
_BLOCKS_PER_POOL = 16
_LANES = 64
_POOLS_PER_LANE = 4  # "several": fewer, and the last, short group of lanes would dominate


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of the shuffle; part of a run's identity, never derived from ranks or memory."""

    sequence_length: int
    """L, tokens per row."""
    block_tokens: int
    """B, a multiple of L."""
    blocks_per_pool: int
    """K."""
    lanes: int
    """V, pools consumed side by side."""

    @property
    def rows_per_pool(self) -> int:
        """n, rows of every pool but the last."""
        return self.blocks_per_pool * self.block_tokens // self.sequence_length


def choose_geometry(num_tokens: int, *, sequence_length: int) -> Geometry:
    """Return the default geometry: smaller blocks, then fewer lanes, for a smaller corpus.

    A corpus of at most 16 of the smallest blocks is a single pool: a perfect document shuffle.

    >>> choose_geometry(10**12, sequence_length=4096).lanes
    64
    >>> choose_geometry(1000, sequence_length=16).lanes
    1
    """
    block_rows = _BLOCK_ROWS

    def pools() -> int:
        return num_tokens // (_BLOCKS_PER_POOL * block_rows * sequence_length)

    while block_rows > _MIN_BLOCK_ROWS and pools() < _POOLS_PER_LANE * _LANES:
        block_rows //= 2
    return Geometry(
        sequence_length=sequence_length,
        block_tokens=block_rows * sequence_length,
        blocks_per_pool=_BLOCKS_PER_POOL,
        lanes=max(1, min(_LANES, pools() // _POOLS_PER_LANE)),
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Where samples of one corpus are; all arrays are [n] int64."""

    epoch: Int64
    pool: Int64
    lane: Int64
    row: Int64
    """Row inside the pool."""

    def take(self, indices: Int64) -> "Places":
        """Return the places at some indices."""
        return Places(self.epoch[indices], self.pool[indices], self.lane[indices], self.row[indices])


class Order:
    """The order of one token space over all epochs.

    Args:
        name: the corpus's name in the mixture; with the seed it keys every permutation.
    """

    def __init__(self, num_tokens: int, geometry: Geometry, *, name: str, seed: int) -> None:
        self._tokens = num_tokens
        self.geometry = geometry
        self._name = name
        self._seed = seed
        self._full_blocks = num_tokens // geometry.block_tokens
        pool_tokens = geometry.block_tokens * geometry.blocks_per_pool
        self.num_pools = -(-num_tokens // pool_tokens)
        self.samples_per_epoch = -(-num_tokens // geometry.sequence_length)
        self._blocks = lru_cache(maxsize=4)(self._permuted_blocks)

    def key(self, purpose: str, epoch: int, *ids: int) -> int:
        """Return the key of a random choice of this corpus in an epoch."""
        return key_of(self._seed, purpose, self._name, epoch, *ids)

    def rows_in_pool(self, pool: int) -> int:
        """Return how many rows a pool has: n, or what is left for the last one."""
        n = self.geometry.rows_per_pool
        return min(n, self.samples_per_epoch - pool * n)

    def locate(self, samples: Int64) -> Places:
        """Return the places of samples [n] int64, counted over all epochs of this corpus.

        The last group of lanes is short: it has the pools left over, of which the last has only m
        rows. For m rounds all its lanes take turns, then all but the last.
        """
        n, lanes = self.geometry.rows_per_pool, self.geometry.lanes
        epoch, k = np.divmod(samples, self.samples_per_epoch)
        group, inside = np.divmod(k, lanes * n)
        width = np.minimum(lanes, self.num_pools - group * lanes)
        last_rows = np.where(group == (self.num_pools - 1) // lanes, self.rows_in_pool(self.num_pools - 1), n)
        shared = last_rows * width  # samples of the rounds in which every lane of the group takes part
        rest = np.maximum(inside - shared, 0)
        narrow = np.maximum(width - 1, 1)
        in_shared = inside < shared
        row = np.where(in_shared, inside // width, last_rows + rest // narrow)
        lane = np.where(in_shared, inside % width, rest % narrow)
        return Places(epoch=epoch, pool=group * lanes + lane, lane=lane, row=row)

    def pool_ranges(self, epoch: int, pool: int) -> list[tuple[int, int]]:
        """Return the token ranges [start, stop) that make up a pool, in no meaningful order."""
        per_pool, size = self.geometry.blocks_per_pool, self.geometry.block_tokens
        group, lane = divmod(pool, self.geometry.lanes)
        blocks = self._blocks(epoch, group)[lane * per_pool : (lane + 1) * per_pool]
        ranges = [(block * size, (block + 1) * size) for block in blocks]
        if pool == self.num_pools - 1 and self._full_blocks * size < self._tokens:
            ranges.append((self._full_blocks * size, self._tokens))
        if epoch == 0:
            return ranges
        offset = self.key("rotation", epoch) % self._tokens
        return [part for start, stop in ranges for part in self._rotated(start + offset, stop + offset)]

    def _permuted_blocks(self, epoch: int, group: int) -> list[int]:
        """Return the full blocks of all pools of a group of lanes; one call is cheaper than a call a pool."""
        per_group = self.geometry.lanes * self.geometry.blocks_per_pool
        ranks = np.arange(group * per_group, min((group + 1) * per_group, self._full_blocks))
        blocks: list[int] = Permutation(self._full_blocks, key=self.key("blocks", epoch))(ranks).tolist()
        return blocks

    def _rotated(self, start: int, stop: int) -> list[tuple[int, int]]:
        total = self._tokens
        if stop <= total:
            return [(start, stop)]
        if start >= total:
            return [(start - total, stop - total)]
        return [(start, total), (0, stop - total)]

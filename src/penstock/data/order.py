"""Sample index -> epoch, pool, lane and row: the shuffle, as arithmetic.

An epoch of a token space of T tokens, for sequences of L tokens:

    blocks   [0, T) cut into blocks of B tokens; full blocks are permuted, the partial one comes last
    pools    K consecutive permuted blocks; documents are shuffled and packed inside a pool
    lanes    V pools are consumed side by side, round robin, so a batch draws on V*K random blocks

Everything here is closed form in the sample index: nothing is built, stored or scanned, and nothing
depends on the number of ranks. From the second epoch on the block grid is rotated by a keyed offset
(positions modulo T), so that block edges cut other documents each time.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from penstock.core.rng import key_of
from penstock.data.permutation import Permutation
from penstock.data.turns import Turns
from penstock.data.types import Int64

_BLOCK_ROWS = 256
_MIN_BLOCK_ROWS = 16
_BLOCKS_PER_POOL = 16
_LANES = 64
_UNEVEN_POOLS = 64 * _LANES  # from here on a short last group is less than a sixtieth of an epoch
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
        """n, rows of every pool but the last; the last of them is padded where L does not divide a pool."""
        return -(-self.pool_tokens // self.sequence_length)

    @property
    def pool_tokens(self) -> int:
        """Tokens of every pool but the last."""
        return self.blocks_per_pool * self.block_tokens


def choose_geometry(num_tokens: int, *, sequence_length: int, longest: int = 0) -> Geometry:
    """Return the default geometry: smaller blocks, then fewer lanes, for a smaller corpus.

    A corpus of at most 16 of the smallest blocks is a single pool: a perfect document shuffle. Lanes are
    given up, a quarter at most, where the last group of pools is then fuller: a short one ends the epoch
    with samples from few places (docs/adr/0010).

    Args:
        longest: the largest sequence length that the run will come to, where it is known: blocks are sized
            for it from the start.

    >>> choose_geometry(10**12, sequence_length=4096).lanes
    64
    >>> choose_geometry(1000, sequence_length=16).lanes
    1
    """
    block_rows = _BLOCK_ROWS
    unit = -(-max(longest, sequence_length) // sequence_length) * sequence_length

    def pools() -> int:
        return num_tokens // (_BLOCKS_PER_POOL * block_rows * unit)

    while block_rows > _MIN_BLOCK_ROWS and pools() < _POOLS_PER_LANE * _LANES:
        block_rows //= 2
    return Geometry(
        sequence_length=sequence_length,
        block_tokens=block_rows * unit,
        blocks_per_pool=_BLOCKS_PER_POOL,
        lanes=_even_lanes(
            max(1, min(_LANES, pools() // _POOLS_PER_LANE)),
            pools=-(-num_tokens // (_BLOCKS_PER_POOL * block_rows * unit)),
        ),
    )


def _even_lanes(most: int, *, pools: int) -> int:
    """Return how many lanes, from three quarters of the most on, leave the fewest empty at the end.

    >>> _even_lanes(15, pools=63)
    13
    """
    if pools > _UNEVEN_POOLS:
        return most
    return min(range(most, (3 * most - 1) // 4, -1), key=lambda lanes: -pools % lanes)


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

    def put(self, indices: Int64, places: "Places") -> None:
        """Set the places at some indices."""
        self.epoch[indices], self.pool[indices] = places.epoch, places.pool
        self.lane[indices], self.row[indices] = places.lane, places.row


class Order:
    """The order of one token space over all epochs.

    Args:
        name: the corpus's name in the mixture; with the seed it keys every permutation.
    """

    def __init__(self, num_tokens: int, geometry: Geometry, *, name: str, seed: int) -> None:
        self.num_tokens = num_tokens
        self.geometry = geometry
        self.name = name
        sizes = (geometry.sequence_length, geometry.block_tokens, geometry.blocks_per_pool, geometry.lanes)
        self.identity = f"{name} {num_tokens} {sizes}"
        """What tells it from other orders of the corpus. A string, whose hash is kept."""
        self._seed = seed
        self._full_blocks = num_tokens // geometry.block_tokens
        self.num_pools = -(-num_tokens // geometry.pool_tokens)
        n, last = geometry.rows_per_pool, self.num_pools - 1
        self.samples_per_epoch = last * n + self.rows_in_pool(last)
        self._last_group = last // geometry.lanes
        self._even_turns = Turns([n] * geometry.lanes)
        self._last_turns = Turns([self.rows_in_pool(pool) for pool in self.pools_of(self._last_group)])
        self._blocks = lru_cache(maxsize=4)(self._permuted_blocks)

    def at_length(self, sequence_length: int) -> "Order":
        """Return the same pools, cut into rows of another length."""
        geometry = replace(self.geometry, sequence_length=sequence_length)
        return Order(self.num_tokens, geometry, name=self.name, seed=self._seed)

    def key(self, purpose: str, epoch: int, *ids: int) -> int:
        """Return the key of a random choice of this corpus in an epoch."""
        return key_of(self._seed, purpose, self.name, epoch, *ids)

    def tokens_in_pool(self, pool: int) -> int:
        """Return how many tokens a pool has: K * B, or what is left for the last one."""
        return min(self.geometry.pool_tokens, self.num_tokens - pool * self.geometry.pool_tokens)

    def rows_in_pool(self, pool: int) -> int:
        """Return how many rows a pool has: n, or fewer for the last one."""
        return -(-self.tokens_in_pool(pool) // self.geometry.sequence_length)

    def pools_of(self, group: int) -> range:
        """Return the pools that are consumed side by side."""
        lanes = self.geometry.lanes
        return range(group * lanes, min((group + 1) * lanes, self.num_pools))

    def turns_of(self, group: int) -> Turns:
        """Return how the lanes of a group take turns."""
        return self._last_turns if group == self._last_group else self._even_turns

    def locate(self, samples: Int64) -> Places:
        """Return the places of samples [n] int64, counted over all epochs of this corpus."""
        n, lanes = self.geometry.rows_per_pool, self.geometry.lanes
        epoch, k = np.divmod(samples, self.samples_per_epoch)
        group, inside = np.divmod(k, lanes * n)
        row, lane = np.divmod(inside, lanes)
        last = group == self._last_group
        if last.any():
            lane[last], row[last] = self._last_turns.locate(inside[last])
        return Places(epoch=epoch, pool=group * lanes + lane, lane=lane, row=row)

    def sample_of(self, epoch: int, pool: int, row: int) -> int:
        """Return the sample at a place: the inverse of `locate`."""
        group, lane = divmod(pool, self.geometry.lanes)
        before = epoch * self.samples_per_epoch + group * self.geometry.lanes * self.geometry.rows_per_pool
        return before + self.turns_of(group).sample_of(lane, row)

    def pool_ranges(self, epoch: int, pool: int) -> list[tuple[int, int]]:
        """Return the token ranges [start, stop) that make up a pool, in no meaningful order."""
        per_pool, size = self.geometry.blocks_per_pool, self.geometry.block_tokens
        group, lane = divmod(pool, self.geometry.lanes)
        blocks = self._blocks(epoch, group)[lane * per_pool : (lane + 1) * per_pool]
        ranges = [(block * size, (block + 1) * size) for block in blocks]
        if pool == self.num_pools - 1 and self._full_blocks * size < self.num_tokens:
            ranges.append((self._full_blocks * size, self.num_tokens))
        if epoch == 0:
            return ranges
        offset = self.key("rotation", epoch) % self.num_tokens
        return [part for start, stop in ranges for part in self._rotated(start + offset, stop + offset)]

    def pools_with(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the pools, ascending, that hold some of tokens [start, stop): `pool_ranges` backwards."""
        offset = 0 if epoch == 0 else self.key("rotation", epoch) % self.num_tokens
        size, last = self.geometry.block_tokens, self.num_pools - 1
        positions = [*range(start - offset, stop - offset, size), stop - 1 - offset]
        blocks = {position % self.num_tokens // size for position in positions}
        if start < offset < stop:
            blocks |= {0, (self.num_tokens - 1) // size}  # the range runs over the end of the rotated grid
        full = np.array(sorted(block for block in blocks if block < self._full_blocks), dtype=np.int64)
        ranks = Permutation(self._full_blocks, key=self.key("blocks", epoch)).inverse(full)
        pools = {min(rank // self.geometry.blocks_per_pool, last) for rank in ranks.tolist()}
        return sorted(pools | ({last} if len(full) < len(blocks) else set()))

    def _permuted_blocks(self, epoch: int, group: int) -> list[int]:
        """Return the full blocks of all pools of a group of lanes; one call is cheaper than a call a pool."""
        per_group = self.geometry.lanes * self.geometry.blocks_per_pool
        ranks = np.arange(group * per_group, min((group + 1) * per_group, self._full_blocks))
        blocks: list[int] = Permutation(self._full_blocks, key=self.key("blocks", epoch))(ranks).tolist()
        return blocks

    def _rotated(self, start: int, stop: int) -> list[tuple[int, int]]:
        total = self.num_tokens
        if stop <= total:
            return [(start, stop)]
        if start >= total:
            return [(start - total, stop - total)]
        return [(start, total), (0, stop - total)]

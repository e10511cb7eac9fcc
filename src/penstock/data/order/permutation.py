"""Keyed shuffle of a corpus: block and pool sizes, and the blocks of each pool.

The full blocks of a token space are permuted; a partial block, if any, closes the last pool. From the second
epoch on, the grid of blocks is rotated by a keyed offset (positions modulo T), so that block edges cut other
documents each time.

Shuffling 10^14 tokens by an array of indices takes terabytes and hours; a Feistel network computes any
element of the permutation from its index alone. The halves may differ by one bit (an alternating, unbalanced
network), so the domain is the smallest power of two >= n; values outside [0, n) are permuted again until they
fall inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), at most
twice on average.

The round function is a shift-xor-multiply mixer. Rounds that only multiply and add leak the lowest bit
(parity) of the index through all rounds.

row_order.py explains the sizes. They are part of a run's identity: if they were derived from the number of
ranks or from memory, another machine would read in another order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.rng import mix64


class Permutation:
    """Keyed bijection on [0, n).

    >>> sorted(Permutation(10, key=7)(np.arange(10)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, n: int, *, key: int) -> None:
        self._n = np.uint64(n)
        bits = max(n - 1, 0).bit_length()
        self._left, self._right = bits // 2, bits - bits // 2
        counters = np.arange(_ROUNDS, dtype=np.uint64)
        self._round_keys = mix64(counters + np.uint64(key))  # wraps around by design

    def __call__(self, indices: Int64) -> Int64:
        """Map indices in [0, n), any shape, to their images."""
        values = self._network(indices.astype(np.uint64))
        while (outside := values >= self._n).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def inverse(self, images: Int64) -> Int64:
        """Map images in [0, n), any shape, back to their indices.

        >>> permutation = Permutation(1000, key=7)
        >>> permutation.inverse(permutation(np.arange(3))).tolist()
        [0, 1, 2]
        """
        values = self._network_back(images.astype(np.uint64))
        while (outside := values >= self._n).any():
            values[outside] = self._network_back(values[outside])
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> np.uint64(self._right), values & _mask(self._right)
        left_bits, right_bits = self._left, self._right
        for round_key in self._round_keys:
            left, right = right, left ^ (mix64(right ^ round_key) & _mask(left_bits))
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right

    def _network_back(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> np.uint64(self._right), values & _mask(self._right)
        for index, round_key in reversed(list(enumerate(self._round_keys))):
            left_bits = self._right if index % 2 else self._left
            left, right = right ^ (mix64(left ^ round_key) & _mask(left_bits)), left
        return (left << np.uint64(self._right)) | right


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
        """n, rows of every pool but the last; a pool's last row is padded if L does not divide the pool."""
        return -(-self.pool_tokens // self.sequence_length)

    @property
    def pool_tokens(self) -> int:
        """Tokens of every pool but the last."""
        return self.blocks_per_pool * self.block_tokens


class Blocks:
    """Permuted blocks of one token space, for every epoch.

    Args:
        key: (purpose, epoch) -> key of a random choice.
        same: True if all epochs use the blocks of epoch 0, so that rows are counted only once.
    """

    def __init__(
        self, num_tokens: int, geometry: Geometry, *, key: Callable[[str, int], int], same: bool
    ) -> None:
        self._num_tokens = num_tokens
        self._size = geometry.block_tokens
        self._per_pool = geometry.blocks_per_pool
        self._lanes = geometry.lanes
        self._num_full = num_tokens // geometry.block_tokens
        self._last_pool = -(-num_tokens // geometry.pool_tokens) - 1
        self._key = key
        self._same = same
        self._of_group = lru_cache(maxsize=4)(self._permuted)

    def of_pool(self, epoch: int, pool: int) -> list[tuple[int, int]]:
        """Return the token ranges [start, stop) of a pool, in no meaningful order."""
        epoch = self._grid(epoch)
        group, lane = divmod(pool, self._lanes)
        blocks = self._of_group(epoch, group)[lane * self._per_pool : (lane + 1) * self._per_pool]
        ranges = [(block * self._size, (block + 1) * self._size) for block in blocks]
        if pool == self._last_pool and self._num_full * self._size < self._num_tokens:
            ranges.append((self._num_full * self._size, self._num_tokens))
        if epoch == 0:
            return ranges
        offset = self._offset(epoch)
        return [part for start, stop in ranges for part in self._wrapped(start + offset, stop + offset)]

    def pools_at(self, epoch: int, positions: Int64) -> Int64:
        """Return the pool of each token position (any shape): the inverse of `of_pool`."""
        epoch = self._grid(epoch)
        blocks = (positions - self._offset(epoch)) % self._num_tokens // self._size
        pools = np.full(blocks.shape, self._last_pool)
        full = blocks < self._num_full
        ranks = self._permutation(epoch).inverse(blocks[full])
        pools[full] = np.minimum(ranks // self._per_pool, self._last_pool)
        return pools

    def pools_with(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the pools, ascending, that contain any of tokens [start, stop)."""
        positions = [*range(start, stop, self._size), stop - 1]
        seam = self._offset(self._grid(epoch))
        if start < seam < stop:  # the range crosses the end of the rotated grid
            positions += [seam - 1, seam]
        found: list[int] = np.unique(self.pools_at(epoch, np.array(positions, dtype=np.int64))).tolist()
        return found

    def _grid(self, epoch: int) -> int:
        """Return the epoch whose block grid is used: 0 if all epochs share it."""
        return 0 if self._same else epoch

    def _offset(self, epoch: int) -> int:
        return 0 if epoch == 0 else self._key("rotation", epoch) % self._num_tokens

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(self._num_full, key=self._key("blocks", epoch))

    def _permuted(self, epoch: int, group: int) -> list[int]:
        """Return the full blocks of all pools in a group of lanes: one permutation call for all of them."""
        per_group = self._lanes * self._per_pool
        ranks = np.arange(group * per_group, min((group + 1) * per_group, self._num_full))
        blocks: list[int] = self._permutation(epoch)(ranks).tolist()
        return blocks

    def _wrapped(self, start: int, stop: int) -> list[tuple[int, int]]:
        total = self._num_tokens
        if stop <= total:
            return [(start, stop)]
        if start >= total:
            return [(start - total, stop - total)]
        return [(start, total), (0, stop - total)]


_ROUNDS = 6  # even, so that halves of unequal width end up in their original positions


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


_BLOCK_ROWS = 256
_MIN_BLOCK_ROWS = 16
_BLOCKS_PER_POOL = 16
_LANES = 64
_UNEVEN_POOLS = 64 * _LANES  # from this number of pools on, a short last group is < 1/60 of an epoch
_POOLS_PER_LANE = 4  # minimum; with fewer, the short last group of lanes would be most of the epoch


def choose_geometry(num_tokens: int, *, sequence_length: int, longest: int = 0) -> Geometry:
    """Return the default geometry: a smaller corpus gets smaller blocks, then fewer lanes.

    A corpus of at most 16 of the smallest blocks is a single pool: a perfect document shuffle. Up to a
    quarter of the lanes is given up to fill the last group of pools: a nearly empty group would end the epoch
    with samples from few blocks.

    Args:
        longest: largest sequence length planned for the run; blocks are sized for it from the start.


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
    """Return the number of lanes in [3/4 most, most] that leaves the fewest lanes empty in the last group.

    >>> _even_lanes(15, pools=63)
    13
    """
    if pools > _UNEVEN_POOLS:
        return most
    return min(range(most, (3 * most - 1) // 4, -1), key=lambda lanes: -pools % lanes)

"""Which blocks of tokens make up a pool, in any epoch: the shuffle of a corpus, read both ways.

The full blocks of a token space are permuted; the partial one, if there is one, closes the last pool. From
the second epoch on the grid of blocks is rotated by a keyed offset (positions modulo T), so that block edges
cut other documents each time.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from penstock.data.geometry import Geometry
from penstock.data.permutation import Permutation
from penstock.data.types import Int64


class Blocks:
    """The blocks of one token space, over all epochs.

    Args:
        key: (purpose, epoch) -> what keys a random choice of the corpus.
        same: in every epoch, as where the rows of pools are counted, once.
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
        """Return the token ranges [start, stop) that make up a pool, in no meaningful order."""
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
        """Return the pool that holds each token, positions of any shape: `of_pool` backwards."""
        epoch = self._grid(epoch)
        blocks = (positions - self._offset(epoch)) % self._num_tokens // self._size
        pools = np.full(blocks.shape, self._last_pool)
        full = blocks < self._num_full
        ranks = self._permutation(epoch).inverse(blocks[full])
        pools[full] = np.minimum(ranks // self._per_pool, self._last_pool)
        return pools

    def pools_with(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the pools, ascending, that hold some of tokens [start, stop)."""
        positions = [*range(start, stop, self._size), stop - 1]
        seam = self._offset(self._grid(epoch))
        if start < seam < stop:  # the range runs over the end of the rotated grid
            positions += [seam - 1, seam]
        found: list[int] = np.unique(self.pools_at(epoch, np.array(positions, dtype=np.int64))).tolist()
        return found

    def _grid(self, epoch: int) -> int:
        """Return the epoch whose blocks are those of an epoch."""
        return 0 if self._same else epoch

    def _offset(self, epoch: int) -> int:
        return 0 if epoch == 0 else self._key("rotation", epoch) % self._num_tokens

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(self._num_full, key=self._key("blocks", epoch))

    def _permuted(self, epoch: int, group: int) -> list[int]:
        """Return the full blocks of all pools of a group of lanes; one call is cheaper than a call a pool."""
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

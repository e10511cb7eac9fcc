"""Sizes of the shuffle: blocks, pools and lanes, chosen once from the size of a corpus.

What the sizes mean is in order.py. They are part of a run's identity: were they derived from ranks or memory,
another machine would read in another order.
"""

from dataclasses import dataclass

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

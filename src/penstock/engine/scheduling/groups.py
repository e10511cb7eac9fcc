"""Cache groups: layers that share block tables, and the blocks that a sequence needs; integers only.

Layers with one attention window keep the same positions of a sequence, so they can share its block table: a
*group*. A group without a window keeps all positions. A group with one releases the blocks that no later
token sees while the sequence runs.

    Gemma 3, 5 of 26 layers drawn:     group        keeps, of 32k positions
    layers 0-3   window 512            0            the last 512, and those that a step computes
    layers 4, 6-8   window 512         1            the same
    layer 5, 11, 17, 23                2            all

All groups take blocks from one pool, so a block has the same bytes in each: all groups have equally many
layers, and the last group of a window may have some that it does not use. `docs/adr/0103` has the reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_UNUSED = 8
"""At most one unused layer for this many layers of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share block tables."""

    window: int | None
    """Attention window: a token sees itself and `window - 1` before it; None: all."""
    layers: tuple[int, ...]
    """Indices among the layers with attention, ascending; at most `rows_of` all groups."""


def cache_groups(windows: Sequence[int | None], *, context: int) -> tuple[CacheGroup, ...]:
    """Divide layers into the fewest groups of equal size that leave few layers unused.

    Args:
        windows: of each layer with attention, in tokens; None: the whole context.
        context: maximum tokens of a sequence; a window of as many is none.

    >>> [len(group.layers) for group in cache_groups([4, 4, 4, None] * 2, context=9)]
    [2, 2, 2, 2]
    >>> cache_groups([4, 4], context=4)
    (CacheGroup(window=None, layers=(0, 1)),)
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(None if window is None or window >= context else window, []).append(layer)
    counts = [len(layers) for layers in by_window.values()]
    size = min(
        (
            size
            for size in range(1, max(counts) + 1)
            if all(_used(n, size) <= n + n // _UNUSED for n in counts)
        ),
        key=lambda size: sum(_used(n, size) // size + _used(n, size) / 2**20 for n in counts),
    )
    return tuple(
        CacheGroup(window=window, layers=tuple(layers[first : first + size]))
        for window, layers in by_window.items()
        for first in range(0, len(layers), size)
    )


def _used(num_layers: int, size: int) -> int:
    return -(-num_layers // size) * size


def rows_of(groups: Sequence[CacheGroup]) -> int:
    """Return the number of layers whose keys and values a block has room for."""
    return max(len(group.layers) for group in groups)


def first_block(position: int, window: int | None, block_size: int) -> int:
    """Return the first block that a token at `position`, or a later one, sees.

    >>> first_block(9, 4, 2), first_block(9, None, 2)
    (3, 0)
    """
    return 0 if window is None else max(0, position + 1 - window) // block_size


def max_blocks(window: int | None, *, block_size: int, share_tokens: int) -> int | None:
    """Return the most blocks that a sequence holds in a group while a step computes `share_tokens` of it.

    None: as many as it has tokens.

    >>> max_blocks(4, block_size=2, share_tokens=3)  # 6 positions, from the middle of a block on
    4
    """
    return None if window is None else (window + share_tokens + 2 * block_size - 3) // block_size


def blocks_of(num_tokens: int, windows: Sequence[int | None], *, block_size: int, share_tokens: int) -> int:
    """Return the most blocks that a sequence of so many tokens holds at a time, over all groups.

    >>> blocks_of(100, (None, 4), block_size=2, share_tokens=3)
    54
    """
    whole = -(-num_tokens // block_size)
    most = (max_blocks(window, block_size=block_size, share_tokens=share_tokens) for window in windows)
    return sum(whole if some is None else min(whole, some) for some in most)

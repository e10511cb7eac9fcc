"""Write plan of a checkpoint: each tensor is written once, bytes spread evenly over ranks. Pure functions.

Each rank announces the boxes it holds, in some 20 bytes per tensor; equal boxes are replicas. A large replica
is split evenly among its holders, a small one is written whole by the holder with the least so far. The
decision depends only on data that all holders of a box know, so each rank makes it alone.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.boxes import Box, split

SPLIT_BYTES = 65_536
"""Minimum bytes of a split part: a part costs 100 bytes of header, and a seek."""


@dataclass(frozen=True, slots=True)
class Held:
    """Box of a tensor that a rank holds."""

    name: str
    """Name of the tensor."""
    box: Box
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of its elements in bytes."""
        return self.box.num_elements * self.item_bytes

    @property
    def key(self) -> int:
        """64-bit hash of name, box and dtype."""
        text = f"{self.name}|{self.box.offsets}|{self.box.sizes}|{self.item_bytes}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def holders(keys: Sequence[int], of_ranks: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the ranks that hold each box.

    Args:
        keys: keys of the boxes.
        of_ranks: [ranks][boxes] keys of the boxes each rank holds.


    >>> holders([7, 9], [[7, 8], [7, 9]])
    [(0, 1), (1,)]
    """
    found: dict[int, list[int]] = {key: [] for key in keys}
    for rank, held in enumerate(of_ranks):
        for key in held:
            if key in found:
                found[key].append(rank)
    return [tuple(found[key]) for key in keys]


def share_of(rank: int, held: Mapping[Held, tuple[int, ...]]) -> list[tuple[str, Box]]:
    """Return the tensors, and parts of them, that a rank writes.

    Args:
        held: box -> the ranks that hold it, this one among them.


    >>> w = Held("w", Box((0,), (100_000,)), 4)
    >>> share_of(1, {w: (0, 1)})
    [('w', Box(offsets=(50000,), sizes=(50000,)))]
    """
    groups: dict[tuple[int, ...], list[Held]] = defaultdict(list)
    for each, ranks in held.items():
        if each.num_bytes:
            groups[ranks].append(each)
    return [
        (name, part)
        for ranks, boxes in groups.items()
        for owner, name, part in _shared_out(ranks, boxes)
        if owner == rank
    ]


def _shared_out(ranks: Sequence[int], boxes: Sequence[Held]) -> list[tuple[int, str, Box]]:
    """Divide boxes held by the same ranks among them: (rank, tensor, part)."""
    written = dict.fromkeys(ranks, 0)
    found = []
    for each in sorted(boxes, key=lambda held: (-held.num_bytes, held.name)):
        parts = min(len(ranks), max(1, each.num_bytes // SPLIT_BYTES))
        for part in split(each.box, parts):
            rank = min(ranks, key=lambda rank: (written[rank], rank))
            written[rank] += part.num_elements * each.item_bytes
            found.append((rank, each.name, part))
    return found

"""Which gathers may be under way while a unit computes, by a window of bytes; pure, no torch.

A window in modules is too much for large ones and too little for small ones; unbounded, gathers outrun
compute until memory is gone, and the allocator's stalls cost more than the network (PyTorch and IBM,
"Scaling PyTorch FSDP for training foundation models", 2022). Lists are made before the step, from sizes
that all ranks agree on: what decided by what has arrived would order collectives differently on each.
"""

from collections.abc import Collection, Sequence


def window_of(sizes: Sequence[int], *, asked: float, usual: int = 2) -> float:
    """Return the bytes that may be under way: as asked, but no less than the largest unit.

    Args:
        sizes: of the units, in bytes.
        asked: 0 for as many of the largest as is usual.
        usual: for gathers two, one about to be needed and the next.

    >>> window_of([3, 5, 4], asked=0), window_of([3, 5, 4], asked=2)
    (9, 5)
    """
    largest = sorted(sizes, reverse=True)
    return max(asked, largest[0]) if asked and sizes else sum(largest[:usual])


def ahead(sizes: Sequence[int], window: float, *, there: Collection[int] = ()) -> list[list[int]]:
    """Return, for each unit in order of use, which later ones are gathered while it computes.

    When a unit begins, it has arrived itself; those of its list are under way then, the nearest first.
    Units of size 0, which take none of the window's memory, are in no list.

    Args:
        window: bytes; the first unit may be larger, all others are not.
        there: units that stayed from the pass before: they take their part of the window, and are in no list.

    >>> ahead([4, 4, 0, 4, 4], 8)
    [[1, 3], [3, 4], [3, 4], [4], []]
    >>> ahead([4, 4, 4, 4], 8, there={1})
    [[2], [2, 3], [3], []]
    """
    lists = []
    for unit in range(len(sizes)):
        under_way, chosen = 0, []
        for later in range(unit + 1, len(sizes)):
            under_way += sizes[later]
            if under_way > window:
                break
            if sizes[later] and later not in there:
                chosen.append(later)
        lists.append(chosen)
    return lists


def staying(sizes: Sequence[int], window: float) -> frozenset[int]:
    """Return the last units of a pass that a window has room for; the next pass, its way back, begins there.

    >>> sorted(staying([4, 4, 0, 4, 4], 8))
    [2, 3, 4]
    """
    room, stays = window, []
    for unit in reversed(range(len(sizes))):
        room -= sizes[unit]
        if room < 0:
            break
        stays.append(unit)
    return frozenset(stays)


class Ledger:
    """Bytes of gathers under way, and the most there ever were."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def begin(self, num_bytes: int) -> None:
        """Count a gather that starts."""
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def end(self, num_bytes: int) -> None:
        """Count one that has arrived."""
        self.now -= num_bytes
        assert self.now >= 0, self.now

"""Gather plan: which parameters stay gathered, and which gathers may be in flight, in bytes; no torch.

A window in modules is too much for large ones and too little for small ones; without a limit, gathers outrun
compute until memory runs out, and the allocator's stalls cost more than the network (PyTorch and IBM,
"Scaling PyTorch FSDP for training foundation models", 2022). The plan is made before the step, from sizes
that are equal on all ranks: a decision by what has arrived would order the collectives differently on each.

With m micro-batches a unit that is freed after each forward and backward pass is gathered 2 m times per step,
and its gradients are reduced m times. One whose parameters stay gathered is gathered once; one whose
gradients are accumulated unsharded is reduced once. What saves most bytes on the wire per byte of memory is
kept first: with equal dtypes, parameters of blocks (2 m - 1), then gradients and what stays between passes
anyway (m - 1).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


def window_of(sizes: Sequence[int], *, asked: float, usual: int = 2) -> float:
    """Return the bytes that may be in flight: `asked`, but at least the largest unit.

    Args:
        sizes: bytes of the units.
        asked: 0: the sum of the `usual` largest units.
        usual: 2 for gathers: the one needed next and the one after.

    >>> window_of([3, 5, 4], asked=0), window_of([3, 5, 4], asked=2)
    (9, 5)
    """
    largest = sorted(sizes, reverse=True)
    return max(asked, largest[0]) if asked and sizes else sum(largest[:usual])


def ahead(sizes: Sequence[int], window: float, *, there: Collection[int] = ()) -> list[list[int]]:
    """Return, for each unit in order of use, the later units to gather while it computes.

    When a unit starts, it has arrived itself; those of its list are in flight then, nearest first. Units of
    size 0, which take no window memory, are in no list.

    Args:
        window: bytes; only the first unit may be larger.
        there: units still gathered from the previous pass: they count in the window, and are in no list.

    >>> ahead([4, 4, 0, 4, 4], 8)
    [[1, 3], [3, 4], [3, 4], [4], []]
    >>> ahead([4, 4, 4, 4], 8, there={1})
    [[2], [2, 3], [3], []]
    """
    lists = []
    for unit in range(len(sizes)):
        in_progress, chosen = 0, []
        for later in range(unit + 1, len(sizes)):
            in_progress += sizes[later]
            if in_progress > window:
                break
            if sizes[later] and later not in there:
                chosen.append(later)
        lists.append(chosen)
    return lists


def staying(sizes: Sequence[int], window: float) -> frozenset[int]:
    """Return the last units of a pass that fit the window; the next pass, in reverse, begins with them.

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
    """Counter of bytes of gathers in flight, with its maximum."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def begin(self, num_bytes: int) -> None:
        """Count a started gather."""
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def end(self, num_bytes: int) -> None:
        """Count a completed gather."""
        self.now -= num_bytes
        assert self.now >= 0, self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes of an FSDP unit, equal on all ranks that share it."""

    parameters: int
    """Bytes of the gathered parameters."""
    gradients: int
    """Bytes of the unsharded gradients."""
    gathers: int = 2
    """Gathers per micro-batch over the slow link: 1 if it stays gathered between forward and backward."""


@dataclass(frozen=True, slots=True)
class ResidentUnits:
    """Units whose parameters or gradients stay unsharded until the last micro-batch."""

    parameters: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()


def choose(units: Sequence[UnitBytes], *, budget: float, num_micro_batches: int) -> ResidentUnits:
    """Return the units to keep, as indices; deterministic.

    Args:
        budget: bytes; infinity keeps everything that saves anything.

    >>> blocks = [UnitBytes(parameters=10, gradients=20)] * 3
    >>> kept = choose(blocks, budget=45, num_micro_batches=4)
    >>> sorted(kept.parameters), sorted(kept.gradients)
    ([0, 1, 2], [])
    """
    saved = [(unit.gathers * num_micro_batches - 1, "parameters", i) for i, unit in enumerate(units)]
    saved += [(num_micro_batches - 1, "gradients", i) for i in range(len(units))]
    kept: dict[str, set[int]] = {"parameters": set(), "gradients": set()}
    for times, what, index in sorted(saved, key=lambda saving: (-saving[0], saving[1] != "parameters")):
        size: int = getattr(units[index], what)
        if times > 0 and size <= budget:
            budget -= size
            kept[what].add(index)
    return ResidentUnits(frozenset(kept["parameters"]), frozenset(kept["gradients"]))


def sent_bytes(
    units: Sequence[UnitBytes], kept: ResidentUnits, *, num_micro_batches: int, num_ranks: int
) -> int:
    """Return the bytes that a rank sends in a step to gather and reduce.

    >>> units = [UnitBytes(parameters=2, gradients=4)]
    >>> everything = choose(units, budget=6, num_micro_batches=4)
    >>> [sent_bytes(units, kept, num_micro_batches=4, num_ranks=2) for kept in (ResidentUnits(), everything)]
    [16, 3]
    """
    total = 0
    for index, unit in enumerate(units):
        total += unit.parameters * (1 if index in kept.parameters else unit.gathers * num_micro_batches)
        total += unit.gradients * (1 if index in kept.gradients else num_micro_batches)
    return total * (num_ranks - 1) // num_ranks

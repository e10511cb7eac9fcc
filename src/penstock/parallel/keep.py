"""What stays whole on a rank through the micro-batches of a step, by a budget of bytes; pure, no torch.

With m micro-batches a unit that is freed after each forward and backward pass is gathered 2 m times a step
and its gradients are reduced m times. One whose parameters stay is gathered once; one whose gradients are
summed whole is reduced once. What saves most bytes on the wire for each byte of memory is kept first: with
equal types, parameters of blocks (2 m - 1), then gradients and what is kept between passes anyway (m - 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit of sharding, in bytes that are equal on all ranks that share it."""

    parameters: int
    """Gathered."""
    gradients: int
    """Whole, as they are summed."""
    gathers: int = 2
    """In one micro-batch, over the slow link: 1 where it stays between forward and backward."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Which units keep what until the last micro-batch."""

    parameters: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()


def choose(units: Sequence[Unit], *, budget: float, num_micro_batches: int) -> Kept:
    """Return what to keep of units, their indices; the same for the same arguments.

    Args:
        budget: bytes; infinity keeps all that saves anything.

    >>> blocks = [Unit(parameters=10, gradients=20)] * 3
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
    return Kept(frozenset(kept["parameters"]), frozenset(kept["gradients"]))


def sent_bytes(units: Sequence[Unit], kept: Kept, *, num_micro_batches: int, num_ranks: int) -> int:
    """Return what a rank sends in a step to gather and reduce.

    >>> units = [Unit(parameters=2, gradients=4)]
    >>> everything = choose(units, budget=6, num_micro_batches=4)
    >>> [sent_bytes(units, kept, num_micro_batches=4, num_ranks=2) for kept in (Kept(), everything)]
    [16, 3]
    """
    total = 0
    for index, unit in enumerate(units):
        total += unit.parameters * (1 if index in kept.parameters else unit.gathers * num_micro_batches)
        total += unit.gradients * (1 if index in kept.gradients else num_micro_batches)
    return total * (num_ranks - 1) // num_ranks

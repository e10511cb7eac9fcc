"""Boxes of a tensor in global coordinates, and which of them the cuts of a mesh leave to one rank; pure.

A box is where it begins and how far it reaches along each dim.

DTensor's rules: a dim is cut into `ceil(n / parts)`-sized pieces, the last ones smaller or empty; where
several axes of a mesh cut one dim, the first axis cuts first. The exception are strided shards (FSDP over
tensor parallelism): they cut what the later axes have left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements inside; 1 for a scalar, 0 where a size is 0."""
        return prod(self.sizes)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that cut this box out of an array that holds `outer`."""
        return tuple(
            slice(ours - theirs, ours - theirs + size)
            for ours, theirs, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Cut:
    """How one axis of a mesh cuts a tensor; an axis that repeats it has none."""

    dim: int
    parts: int
    index: int
    """Which part is meant."""
    strided: bool = False
    """Whether it cuts what the other axes have left."""


def cut_box(shape: Sequence[int], cuts: Sequence[Cut]) -> Box:
    """Return the part of a tensor that the cuts of a mesh leave to one rank.

    >>> cut_box([10, 4], [Cut(dim=0, parts=4, index=3)])
    Box(offsets=(9, 0), sizes=(1, 4))
    >>> cut_box([8], [Cut(0, 2, 1, strided=True), Cut(0, 2, 0)])
    Box(offsets=(2,), sizes=(2,))
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for cut in (*(c for c in cuts if not c.strided), *(c for c in cuts if c.strided)):
        each = -(-sizes[cut.dim] // cut.parts)
        start = min(each * cut.index, sizes[cut.dim])
        offsets[cut.dim] += start
        sizes[cut.dim] = min(each, sizes[cut.dim] - start)
    return Box(tuple(offsets), tuple(sizes))

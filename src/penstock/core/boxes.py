"""Boxes of a tensor in global coordinates: the part of each rank, and how two parts overlap. Pure functions.

A box is an offset and a size along each dim.

DTensor's rules: a dim is cut into `ceil(n / parts)`-sized pieces, the last ones smaller or empty; if several
axes of a mesh cut one dim, the first axis cuts first. The exception is strided shards (FSDP over tensor
parallelism): they cut what the later axes leave.

Layouts are compared through boxes alone: a tensor written under one mesh is read under any other by
intersecting boxes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Rectangular part of a tensor: offsets and sizes along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar, 0 if a size is 0."""
        return prod(self.sizes)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box from an array that holds `outer`."""
        return tuple(
            slice(ours - theirs, ours - theirs + size)
            for ours, theirs, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class AxisShard:
    """Shard of a tensor along one axis of a mesh; a replicating axis has none."""

    dim: int
    parts: int
    index: int
    """Index of this part, in [0, parts)."""
    strided: bool = False
    """True if it cuts what the other axes leave (FSDP over tensor parallelism)."""


def cut_box(shape: Sequence[int], cuts: Sequence[AxisShard]) -> Box:
    """Return the part of a tensor that a rank holds after the cuts of the mesh axes.

    >>> cut_box([10, 4], [AxisShard(dim=0, parts=4, index=3)])
    Box(offsets=(9, 0), sizes=(1, 4))
    >>> cut_box([8], [AxisShard(0, 2, 1, strided=True), AxisShard(0, 2, 0)])
    Box(offsets=(2,), sizes=(2,))
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for cut in (*(c for c in cuts if not c.strided), *(c for c in cuts if c.strided)):
        each = -(-sizes[cut.dim] // cut.parts)
        start = min(each * cut.index, sizes[cut.dim])
        offsets[cut.dim] += start
        sizes[cut.dim] = min(each, sizes[cut.dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the overlap of two boxes; None if it is empty.

    >>> intersection(Box((0, 0), (4, 4)), Box((2, 1), (4, 2)))
    Box(offsets=(2, 1), sizes=(2, 2))
    """
    starts = tuple(map(max, a.offsets, b.offsets))
    ends = (min(i + n, j + m) for i, n, j, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def split(box: Box, parts: int) -> list[Box]:
    """Split a box evenly along its first dim with at least `parts` rows, else along its longest.

    >>> split(Box((0, 5), (3, 10)), 2)
    [Box(offsets=(0, 5), sizes=(1, 10)), Box(offsets=(1, 5), sizes=(2, 10))]
    """
    if parts == 1 or not box.sizes:
        return [box]
    dim = next((d for d, size in enumerate(box.sizes) if size >= parts), box.sizes.index(max(box.sizes)))
    edges = [box.sizes[dim] * part // parts for part in range(parts + 1)]
    found = []
    for start, end in pairwise(edges):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, end - start
        found.append(Box(tuple(offsets), tuple(sizes)))
    return [part for part in found if part.num_elements]


def strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides in elements, one per dim.

    >>> strides([2, 3, 4])
    (12, 4, 1)
    """
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def span(part: Box, stored: Box) -> range:
    """Return the range of elements of a stored box, in row-major order, that covers a part of it.

    >>> span(Box((1, 1), (1, 2)), Box((0, 0), (3, 4)))
    range(5, 7)
    """
    steps = strides(stored.sizes)
    first = sum((i - j) * s for i, j, s in zip(part.offsets, stored.offsets, steps, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(part.sizes, steps, strict=True))
    return range(first, last + 1)


def label(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return the name under which a part of a tensor is stored.

    >>> label("w", Box((2, 0), (2, 4)), [4, 4]), label("w", whole([4, 4]), [4, 4])
    ('w@2,0', 'w')
    """
    return name if box == whole(shape) else f"{name}@{','.join(map(str, box.offsets))}"


def parse_label(text: str, sizes: Sequence[int]) -> tuple[str, Box]:
    """Return the tensor and the box of a stored name.

    Raises:
        ValueError: the name is invalid.


    >>> parse_label("w@2,0", [2, 4])
    ('w', Box(offsets=(2, 0), sizes=(2, 4)))
    """
    name, _, at = text.partition("@")
    offsets = tuple(map(int, at.split(","))) if at else (0,) * len(sizes)
    if len(offsets) != len(sizes):
        raise ValueError(f"{text!r} has {len(sizes)} dims")
    return name, Box(offsets, tuple(sizes))


def overlaps(wanted: Box, stored: Sequence[Box]) -> Iterator[tuple[int, Box]]:
    """Yield (index, overlap) for each stored box that overlaps the wanted one."""
    for index, box in enumerate(stored):
        if shared := intersection(wanted, box):
            yield index, shared

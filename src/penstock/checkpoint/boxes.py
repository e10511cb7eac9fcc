"""Parts of a tensor by their boxes: what two share, how one is split, where one lies in a file; pure.

Layouts are compared through boxes alone: what was written under one mesh is read under any other by
intersecting boxes.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from penstock.core.boxes import Box, whole


def intersection(a: Box, b: Box) -> Box | None:
    """Return what two boxes share; None where that is nothing.

    >>> intersection(Box((0, 0), (4, 4)), Box((2, 1), (4, 2)))
    Box(offsets=(2, 1), sizes=(2, 2))
    """
    starts = tuple(map(max, a.offsets, b.offsets))
    ends = (min(i + n, j + m) for i, n, j, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def split(box: Box, parts: int) -> list[Box]:
    """Split a box evenly along its first dim that has as many rows, else along its longest.

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
    """Return the elements from one index to the next of each dim, last dim fastest.

    >>> strides([2, 3, 4])
    (12, 4, 1)
    """
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def span(part: Box, stored: Box) -> range:
    """Return the run of elements of a stored box, row after row, that covers a part of it.

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
    """Return the tensor and the part that a stored name means.

    Raises:
        ValueError: it is no such name.

    >>> parse_label("w@2,0", [2, 4])
    ('w', Box(offsets=(2, 0), sizes=(2, 4)))
    """
    name, _, at = text.partition("@")
    offsets = tuple(map(int, at.split(","))) if at else (0,) * len(sizes)
    if len(offsets) != len(sizes):
        raise ValueError(f"{text!r} has {len(sizes)} dims")
    return name, Box(offsets, tuple(sizes))


def overlaps(wanted: Box, stored: Sequence[Box]) -> Iterator[tuple[int, Box]]:
    """Yield what each stored box has of a wanted one, with its index."""
    for index, box in enumerate(stored):
        if shared := intersection(wanted, box):
            yield index, shared

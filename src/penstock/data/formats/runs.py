"""Tokens and documents that lie in several runs of one file, presented as one: batches, samples, row groups.

A slice inside one run is a view of the file; one that spans runs is a copy. Finding the run costs a
microsecond, however many there are.
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Array, Int64
from penstock.core.errors import CorpusError
from penstock.data.formats import EndsBetween, StoredShard
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.stored import little, served
from penstock.storage.base import Blob, Slices


class TokenRuns:
    """Items in runs, as one run.

    Args:
        starts: [runs + 1] first item of each run, then the number of items.
        dtype: type of an item.
        view: (run, start, stop) -> items [start, stop) of a run, counted from its first.
    """

    def __init__(self, starts: Int64, dtype: npt.DTypeLike, view: Callable[[int, int, int], Array]) -> None:
        # a memoryview, which bisect reads faster than an array and which is smaller than a list
        self._starts = starts.data
        self._count = int(starts[-1])
        self._none, self._view = np.zeros(0, dtype), view

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice, /) -> Array:
        start, stop, _ = part.indices(self._count)
        views = []
        run = bisect_right(self._starts, start) - 1
        while start < stop:
            base, end = self._starts[run], min(stop, self._starts[run + 1])
            views.append(self._view(run, start - base, end - base))
            start, run = end, run + 1
        return views[0] if len(views) == 1 else np.concatenate(views) if views else self._none


def starts_of(counts: Int64) -> Int64:
    """Return where each of some adjacent things begins, then where the last one ends: [n + 1].

    >>> starts_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def runs_of(blob: Blob, dtype: str, *, places: Int64, starts: Int64) -> Slices:
    """Return items that lie in runs of a file; a single run is the file's own array.

    Args:
        dtype: type of an item, such as "int32".
        places: [runs] first byte of each run.
        starts: [runs + 1] first item of each run, then the number of items.

    Raises:
        CorpusError: the file ends before a run does.
    """
    kind, counts = np.dtype(little(dtype)), np.diff(starts)
    held = counts > 0
    if held.sum() == 1:
        return blob.array(kind, offset=int(places[held][0]), count=int(starts[-1]))
    size = kind.itemsize
    ends = places + counts * size
    if (places < 0).any() or (ends > blob.size).any():
        raise CorpusError(
            f"{blob.name} ends before its tokens do", fix="It is truncated or altered: restore it."
        )
    data, firsts = blob.array(np.uint8, offset=0, count=blob.size), places.data

    def view(run: int, start: int, stop: int) -> Array:
        return data[firsts[run] + start * size : firsts[run] + stop * size].view(kind)

    return TokenRuns(starts, kind, view)


class GroupedEnds:
    """Document ends that are found group by group, each group when it is first asked about.

    Args:
        starts: [groups + 1] first token of each group, then the number of tokens.
        ends_of: group -> the ends of its documents, counted from its first token.
    """

    def __init__(self, starts: Int64, ends_of: Callable[[int], DocumentEnds]) -> None:
        self._starts = starts.data
        self._ends_of = ends_of

    def between(self, start: int, stop: int) -> Int64:
        """Return the ends e with start < e <= stop.

        Raises:
            CorpusError: they do not rise.
        """
        starts = self._starts
        found = []
        group = max(bisect_right(starts, start) - 1, 0)
        while group < len(starts) - 1 and starts[group] <= stop:
            base = starts[group]
            ends = self._ends_of(group)
            if len(ends):
                found.append(ends.between(start - base, stop - base).astype(np.int64, copy=False) + base)
            group += 1
        return np.concatenate(found) if found else np.zeros(0, np.int64)


def run_shard(stored: Slices, dtype: str, num_documents: int, ends: EndsBetween, *, name: str) -> StoredShard:
    """Return the shard of a file whose tokens lie in runs.

    Args:
        stored: the tokens as one of the integer types.
        dtype: that type.
        ends: where the documents end.
        name: the file, for messages.
    """

    def where(position: int) -> str:
        return f"in document {len(ends(-1, position)):,}"

    return StoredShard(served(stored, dtype, name=name, where=where), num_documents, ends)

"""Tokens and documents that lie in several runs of one file, presented as one: batches, samples, row groups.

A slice inside one run is a view of the file; one that spans runs is a copy. Finding the run costs a
microsecond, however many there are.
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from penstock.core.arrays import Array, Int64
from penstock.core.errors import CorpusError
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.stored import little, served
from penstock.storage.base import Blob, Slices

EndsBetween = Callable[[int, int], Int64]
"""(start, stop) -> the ends e of documents with start < e <= stop."""


class TokenRuns:
    """Items of one type in runs of a file, as one run.

    Args:
        data: the file, as bytes.
        dtype: type of an item, as it lies in the file.
        places: [runs] first byte of each run.
        starts: [runs + 1] first item of each run, then the number of items.
    """

    def __init__(self, data: Slices, dtype: str, *, places: Int64, starts: Int64) -> None:
        self._data = data
        self._dtype = np.dtype(dtype)
        # memoryviews, which bisect reads faster than arrays and which are smaller than lists
        self._places, self._starts = places.data, starts.data
        self._count = int(starts[-1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice, /) -> Array:
        start, stop, _ = part.indices(self._count)
        if start >= stop:
            return np.zeros(0, self._dtype)
        run = bisect_right(self._starts, start) - 1
        if stop <= self._starts[run + 1]:
            return self._view(run, start, stop)
        views = []
        while start < stop:
            end = min(stop, self._starts[run + 1])
            views.append(self._view(run, start, end))
            start, run = end, run + 1
        return np.concatenate(views)

    def _view(self, run: int, start: int, stop: int) -> Array:
        size = self._dtype.itemsize
        place = self._places[run] + (start - self._starts[run]) * size
        return self._data[place : place + (stop - start) * size].view(self._dtype)


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
    kind, counts = little(dtype), np.diff(starts)
    held = counts > 0
    if held.sum() == 1:
        return blob.array(kind, offset=int(places[held][0]), count=int(starts[-1]))
    ends = places + counts * np.dtype(kind).itemsize
    if (places < 0).any() or (ends > blob.size).any():
        raise CorpusError(
            f"{blob.name} ends before its tokens do", fix="It is truncated or altered: restore it."
        )
    data = blob.array(np.uint8, offset=0, count=blob.size)
    return TokenRuns(data, kind, places=places, starts=starts)


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


class RunShard:
    """A shard of a file whose tokens lie in runs.

    Args:
        stored: the tokens as one of the integer types.
        dtype: that type.
        num_documents: documents in the shard.
        document_ends: where they end.
        name: the file, for messages.
    """

    def __init__(
        self, stored: Slices, dtype: str, *, num_documents: int, document_ends: EndsBetween, name: str
    ) -> None:
        self.num_tokens = len(stored)
        self.num_documents = num_documents
        self.document_ends = document_ends
        self.tokens = served(stored, dtype, name=name, where=self._document_of)

    def _document_of(self, position: int) -> str:
        return f"in document {len(self.document_ends(-1, position)):,}"

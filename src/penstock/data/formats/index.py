"""Document ends of a shard, searched where they lie: a few pages are read, however many there are."""

from array import array
from bisect import bisect_right

import numpy as np

from penstock.core.arrays import Int64, address
from penstock.core.errors import CorpusError
from penstock.storage.base import Slices

_PAGE = 512  # ends, 4 KiB


class DocumentEnds:
    """The ends of a shard's documents, rising; repeats are empty documents.

    Args:
        ends: [documents] int64; the last is the number of tokens.
        num_tokens: tokens of the shard.
        name: the file they come from, for messages.

    Raises:
        CorpusError: they do not end where the tokens do.
    """

    def __init__(self, ends: Slices, *, num_tokens: int, name: str) -> None:
        self._ends = ends
        self._num_tokens = num_tokens
        self._name = name
        self._count = len(ends)
        # numpy copies the whole of an array that is not aligned before it searches it
        self._array = ends if isinstance(ends, np.ndarray) and ends.flags.aligned else None
        self.in_memory: tuple[int, int] | None = None
        """Address of the ends and their number, where they are one run of memory as long as this is alive."""
        if self._array is not None and self._array.flags.c_contiguous and self._array.dtype == np.int64:
            self.in_memory = address(self._array), self._count
        # The first end of each page where it is known: searches begin alike.
        self._firsts = array("q", [-1]) * (-(-self._count // _PAGE) if self._array is None else 0)
        last = int(ends[self._count - 1 : self._count][0]) if self._count else 0
        if last != num_tokens:
            raise CorpusError(
                f"{name} has documents that end at token {last:,} where there are {num_tokens:,} tokens",
                fix="It is truncated or altered: restore it or make it again.",
            )

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._count

    def between(self, start: int, stop: int) -> Int64:
        """Return the ends e with start < e <= stop.

        Raises:
            CorpusError: they do not rise.
        """
        found = self._between(start, stop)
        if not len(found):
            if self._count and start < self._num_tokens <= stop:  # then the last end should have been here
                raise self._disordered()
        elif found[0] <= start or found[-1] > stop or np.count_nonzero(found[1:] < found[:-1]):
            raise self._disordered()
        return found

    def _between(self, start: int, stop: int) -> Int64:
        if self._array is not None:
            low, high = self._array.searchsorted((start, stop), "right").tolist()
            return np.asarray(self._array[low:high])
        page = max(self._page(start) - 1, 0)
        past = page + 2
        if past < len(self._firsts) and self._first(past) <= stop:
            past = self._page(stop)
        inside = self._ends[page * _PAGE : min(past * _PAGE, self._count)]
        low, high = np.ascontiguousarray(inside).searchsorted((start, stop), "right").tolist()
        return np.asarray(inside[low:high])

    def _page(self, position: int) -> int:
        """Return the first page that begins with an end > position."""
        return bisect_right(range(len(self._firsts)), position, key=self._first)

    def _first(self, page: int) -> int:
        """Return the first end of a page."""
        if (first := self._firsts[page]) < 0:
            first = self._firsts[page] = int(self._ends[page * _PAGE : page * _PAGE + 1][0])
        return first

    def _disordered(self) -> CorpusError:
        return CorpusError(
            f"{self._name} has document ends that do not rise", fix="Restore it or make it again."
        )

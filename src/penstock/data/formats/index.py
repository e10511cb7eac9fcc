"""Document ends of a shard, searched where they lie: a few pages are read, however many there are."""

from bisect import bisect_right

import numpy as np

from penstock.core.errors import CorpusError
from penstock.data.storage import Slices
from penstock.data.types import Int64

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
        found: Int64 = np.asarray(self._ends[self._search(start) : self._search(stop)])
        if not len(found):
            if self._count and start < self._num_tokens <= stop:  # then the last end should have been here
                raise self._disordered()
        elif found[0] <= start or found[-1] > stop or (found[1:] < found[:-1]).any():
            raise self._disordered()
        return found

    def _search(self, position: int) -> int:
        """Return the number of ends <= position."""
        if self._array is not None:
            return int(self._array.searchsorted(position, "right"))
        pages = range(0, self._count, _PAGE)
        page = bisect_right(pages, position, key=lambda at: int(self._ends[at : at + 1][0]))
        first = max(page - 1, 0) * _PAGE
        inside = np.ascontiguousarray(self._ends[first : min(first + _PAGE, self._count)])
        return first + int(inside.searchsorted(position, "right"))

    def _disordered(self) -> CorpusError:
        return CorpusError(
            f"{self._name} has document ends that do not rise", fix="Restore it or make it again."
        )

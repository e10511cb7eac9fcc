"""Packing rule `whole`: never split a fragment; pad the rest of a row.

Best-fit decreasing: longest first, each into the row where it leaves the least room, or into a new row. A
fragment must not be longer than a row; the caller truncates or drops it before.

Fragments of one length are placed together: a row of room r, the tightest for length l, takes r // l of them
before another row is tighter. So the cost depends on the number of distinct lengths, a few thousand, and not
on the number of fragments.
"""

from bisect import bisect_left, insort

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.types import Pieces


def pack(lengths: Int64, *, num_rows: int, sequence_length: int) -> Pieces:  # noqa: ARG001
    """Place fragments into as many rows as needed; any row may be short.

    The number of rows depends on the lengths, not on their order.

    Args:
        lengths: [n] int64 fragment lengths, each at least 1 and at most sequence_length.
        num_rows: ignored; more may be needed.
    """
    descending = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    rows = _Rows(sequence_length)
    placed = [
        rows.place(length, count)
        for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True)
    ]
    row = np.concatenate([np.empty(0, dtype=np.int64), *placed])
    by_row = np.argsort(row, kind="stable")
    fragment = descending[by_row]
    ends = np.cumsum(np.bincount(row, minlength=rows.opened))
    return Pieces(fragment, np.zeros_like(fragment), lengths[fragment], ends)


class _Rows:
    """Rows grouped by their remaining room."""

    def __init__(self, sequence_length: int) -> None:
        self.opened = 0
        self._length = sequence_length
        self._rooms: list[int] = []  # ascending
        self._with: dict[int, list[int]] = {}

    def place(self, length: int, count: int) -> Int64:
        """Place `count` fragments of a length, no longer than those before; return their rows [count]."""
        placed = []
        while count:
            at = bisect_left(self._rooms, length)
            room = self._rooms[at] if at < len(self._rooms) else self._length
            each = room // length
            wanted = -(-count // each)
            taken = self._take(at, wanted) if at < len(self._rooms) else self._open(wanted)
            full = min(len(taken), count // each)
            rest = count - full * each if full < len(taken) else 0
            placed.append(
                np.repeat(np.array(taken, dtype=np.int64), [each] * full + [rest] * (len(taken) - full))
            )
            self._put(taken[:full], room - each * length)
            self._put(taken[full:], room - rest * length)
            count -= full * each + rest
        return np.concatenate(placed)

    def _take(self, at: int, wanted: int) -> list[int]:
        room = self._rooms[at]
        rows = self._with[room]
        taken = rows[-wanted:]
        del rows[-wanted:]
        if not rows:
            del self._with[room], self._rooms[at]
        return taken

    def _open(self, wanted: int) -> list[int]:
        self.opened += wanted
        return list(range(self.opened - wanted, self.opened))

    def _put(self, rows: list[int], room: int) -> None:
        if not rows or not room:
            return
        if room not in self._with:
            insort(self._rooms, room)
        self._with.setdefault(room, []).extend(rows)

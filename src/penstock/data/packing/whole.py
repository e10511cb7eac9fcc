"""`whole`: never split a fragment; pad what no fragment fits.

Best-fit decreasing: longest first, each into the row where it leaves the least room, a new row where none has
enough. A fragment must not be longer than a row: what to do with one is for the caller to say.

Fragments of one length are placed together: a row of room r, the tightest there is for length l, takes
r // l of them before another row is tighter. So the cost is in the number of different lengths, a few
thousand for any number of fragments, and not in the fragments.
"""

from bisect import bisect_left, insort

import numpy as np

from penstock.data.types import Int64, Pieces


def pack(lengths: Int64, *, num_rows: int, sequence_length: int) -> Pieces:  # noqa: ARG001
    """Place fragments into as many rows as it takes, each of which may end short.

    How many rows there are depends on the lengths alone, not on their order.

    Args:
        lengths: [n] int64 fragment lengths, each at least 1 and at most sequence_length.
        num_rows: of no use here: more may be needed.
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
    """Rows by the room that is left in them."""

    def __init__(self, sequence_length: int) -> None:
        self.opened = 0
        self._length = sequence_length
        self._rooms: list[int] = []  # ascending
        self._with: dict[int, list[int]] = {}

    def place(self, length: int, count: int) -> Int64:
        """Place so many fragments of a length, none longer than those before; return their rows [count]."""
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

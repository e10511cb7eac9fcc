"""Many flatbuffer tables at once: what the metadata of an Arrow IPC file's messages says, in numpy.

A table is read field by field, each field for all messages together: 100,000 record batches take a
tenth of a second where one call per batch takes seconds, and no offset leads outside a message
(flatbuffers.dev/internals).
"""

from typing import Self

import numpy as np
import numpy.typing as npt

from penstock.data.formats.damaged import Malformed
from penstock.data.types import Int64

Bytes = npt.NDArray[np.uint8]


class Tables:
    """One table in each of n messages.

    Args:
        data: the bytes of all messages, end to end.
        at: [n] where each table is.
        starts: [n] where each message begins.
        stops: [n] where each message ends.
    """

    def __init__(self, data: Bytes, at: Int64, *, starts: Int64, stops: Int64) -> None:
        self._data, self._at = data, at
        self._starts, self._stops = starts, stops
        self._vtable = at - self._read(at, "<i4")
        self._vtable_size = self._read(self._vtable, "<u2")

    @classmethod
    def roots(cls, data: Bytes, sizes: Int64) -> Self:
        """Return the root tables of messages of these sizes that lie end to end."""
        stops = np.cumsum(sizes, dtype=np.int64)
        starts = stops - sizes
        at = starts + _gather(data, starts, "<u4", starts=starts, stops=stops)
        return cls(data, at, starts=starts, stops=stops)

    def has(self, field: int) -> npt.NDArray[np.bool_]:
        """Return which tables hold a field; one that holds its default may be left out."""
        return self._offset(field) > 0

    def number(self, field: int, dtype: str, *, default: int = 0) -> Int64:
        """Return a field that is a number: [n] int64."""
        offset = self._offset(field)
        values = np.full(len(offset), default, np.int64)
        chosen = np.flatnonzero(offset)
        values[chosen] = self._read(self._at[chosen] + offset[chosen], dtype, chosen)
        return values

    def table(self, field: int) -> "Tables":
        """Return a field that is a table and is never left out."""
        at = self._required(field)
        at = at + self._read(at, "<u4")
        return Tables(self._data, at, starts=self._starts, stops=self._stops)

    def vector(self, field: int) -> tuple[Int64, Int64]:
        """Return where the items of a field that is a vector begin, and how many there are."""
        at = self._required(field)
        at = at + self._read(at, "<u4")
        return at + 4, self._read(at, "<u4")

    def item(self, vector: tuple[Int64, Int64], index: int, *, size: int, part: int) -> Int64:
        """Return the int64 at byte `part` of one item, of `size` bytes, of each vector: [n]."""
        at, count = vector
        if (count <= index).any():
            raise Malformed("a record batch has fewer columns than the schema")
        return self._read(at + index * size + part, "<i8")

    def _offset(self, field: int) -> Int64:
        entry = 4 + 2 * field
        offset = np.zeros(len(self._at), np.int64)
        chosen = np.flatnonzero(self._vtable_size >= entry + 2)
        offset[chosen] = self._read(self._vtable[chosen] + entry, "<u2", chosen)
        return offset

    def _required(self, field: int) -> Int64:
        offset = self._offset(field)
        if not offset.all():
            raise Malformed("a message lacks a field")
        return self._at + offset

    def _read(self, at: Int64, dtype: str, chosen: Int64 | slice = slice(None)) -> Int64:
        return _gather(self._data, at, dtype, starts=self._starts[chosen], stops=self._stops[chosen])


def _gather(data: Bytes, at: Int64, dtype: str, *, starts: Int64, stops: Int64) -> Int64:
    """Return the numbers at these places, each of which must lie in its message."""
    size = np.dtype(dtype).itemsize
    if (at < starts).any() or (at + size > stops).any():
        raise Malformed("an offset leads outside its message")
    found: Int64 = data[at[:, None] + np.arange(size)].view(dtype).ravel().astype(np.int64)
    return found

"""The counts in a Parquet file's footer: rows, values and nulls of one column, by row group.

Read here and not through pyarrow, whose accessors of a damaged footer end the process. The footer is
Thrift's compact protocol without maps, sets and UUIDs (github.com/apache/parquet-format, parquet.thrift).
"""

import struct
from dataclasses import dataclass
from typing import Any

from penstock.data.formats.damaged import Malformed
from penstock.storage.base import Blob

_MAGIC = b"PAR1"
_MAX_DEPTH = 24  # parquet.thrift nests 7 deep

_MAX_COUNT = 2**40
# Fields by number, as parquet.thrift gives them.
_ROW_GROUPS, _COLUMNS, _NUM_ROWS, _META_DATA = 4, 1, 3, 3
_PATH, _NUM_VALUES, _STATISTICS, _NULL_COUNT = 3, 5, 12, 3


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """One row group's counts of one column."""

    rows: int
    values: int
    """With one for each list that is null or empty."""
    nulls: int | None
    """None where the file does not say."""


def group_counts(blob: Blob, column: str) -> list[GroupCounts]:
    """Return the counts of a column that holds lists, by row group.

    Raises:
        Malformed: the footer is damaged.
    """
    if blob.size < 12 or blob.read(blob.size - 4, blob.size) != _MAGIC:
        raise Malformed("the end of a Parquet file is missing")
    (size,) = struct.unpack("<I", blob.read(blob.size - 8, blob.size - 4))
    if size > blob.size - 12:
        raise Malformed("its footer leads outside the file")
    try:
        footer = _Compact(blob.read(blob.size - 8 - size, blob.size - 8)).value(_STRUCT)
        return [_counts(group, column.encode()) for group in footer[_ROW_GROUPS]]
    except (IndexError, KeyError, TypeError, AttributeError, struct.error):
        raise Malformed("its footer is damaged") from None


def _counts(group: dict[int, Any], column: bytes) -> GroupCounts:
    found = [chunk[_META_DATA] for chunk in group[_COLUMNS] if chunk[_META_DATA][_PATH][0] == column]
    if len(found) != 1:
        raise Malformed(f"a row group has {len(found)} columns of tokens")
    nulls = found[0].get(_STATISTICS, {}).get(_NULL_COUNT)
    counts = GroupCounts(group[_NUM_ROWS], found[0][_NUM_VALUES], nulls)
    for count in (counts.rows, counts.values, 0 if nulls is None else nulls):
        if type(count) is not int or not 0 <= count < _MAX_COUNT:
            raise Malformed("a row group has a count that cannot be")
    if (nulls or 0) > counts.values:
        raise Malformed("a row group has more nulls than values")
    return counts


_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12
_INTEGERS = (4, 5, 6)


class _Compact:
    """Values of Thrift's compact protocol, one after another."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self, kind: int, depth: int = 0) -> Any:  # Any: of that kind
        if depth > _MAX_DEPTH:
            raise Malformed("its footer is nested too deeply")
        if kind in _INTEGERS:
            number = self._varint()
            return (number >> 1) ^ -(number & 1)
        if kind == _STRUCT:
            return self._struct(depth)
        if kind == _LIST:
            return self._list(depth)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        sizes = {_BYTE: 1, _DOUBLE: 8}
        if kind == _BINARY:
            return self._take(self._varint())
        if kind not in sizes:
            raise Malformed(f"its footer has a value of an unknown kind {kind}")
        return self._take(sizes[kind])

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise Malformed("its footer is cut off")
        return self._data[start : self._at]

    def _varint(self) -> int:
        number = shift = 0
        while shift < 70:
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
        raise Malformed("its footer has a number of more than 64 bits")

    def _struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._take(1)[0]:
            number = number + (head >> 4) if head >> 4 else self.value(_INTEGERS[0])
            fields[number] = self.value(head & 15, depth + 1)
        return fields

    def _list(self, depth: int) -> list[Any]:
        head = self._take(1)[0]
        size = self._varint() if head >> 4 == 15 else head >> 4
        if size > len(self._data) - self._at:  # an item takes a byte or more
            raise Malformed("its footer is cut off")
        kind = _BYTE if head & 15 in (_TRUE, _FALSE) else head & 15
        return [self.value(kind, depth + 1) for _ in range(size)]

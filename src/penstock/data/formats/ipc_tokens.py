"""Tokens in the record batches of an Arrow IPC file: a column of lists, or one of plain integers.

Nulls: a list that is null is an empty document; a null among the tokens is an error that names its row.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Bits, Int64
from penstock.core.errors import CorpusError
from penstock.core.packages import Package
from penstock.data.formats import Options, StoredShard
from penstock.data.formats.choice import column_of, integer_type, no_tokens, token_lists
from penstock.data.formats.damaged import Malformed, reading
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.ipc import ColumnBuffers, buffers_of, schema_of
from penstock.data.formats.runs import GroupedEnds, run_shard, runs_of, starts_of
from penstock.storage.base import Blob, Storage

pa = Package("pyarrow", "Arrow and Parquet files")


def open_lists(storage: Storage, name: str, options: Options) -> StoredShard:
    """Open a file whose every row is a document: its tokens are a list.

    Raises:
        CorpusError: it is damaged, or has no such column.
        UsageError: which column holds the tokens is not clear.
    """
    blob = storage.open(name)
    schema = schema_of(blob)
    found = token_lists(schema)
    if not found:
        raise no_tokens(schema, options, name=blob.name)
    column = column_of(found, options, name=blob.name, what="lists of integers")
    lists = _Lists.open(
        blob, buffers_of(storage, name, schema, column), kind=schema.field(column).type, dtype=found[column]
    )
    tokens = runs_of(blob, found[column], places=lists.places, starts=lists.starts)
    ends = GroupedEnds(lists.starts, lists.ends_of)
    rows = int(lists.rows.sum())
    return run_shard(tokens, found[column], rows, ends.between, name=blob.name)


def open_batches(storage: Storage, name: str, options: Options) -> StoredShard:
    """Open a file whose every record batch is a document: its tokens are a column of integers.

    Raises:
        CorpusError: it is damaged, or has no such column.
        UsageError: which column holds the tokens is not clear.
    """
    blob = storage.open(name)
    schema = schema_of(blob)
    found = {field.name: str(field.type) for field in schema if integer_type(field.type)}
    if "column" not in options and "tokens" in found:
        options = {"column": "tokens"}
    column = column_of(found, options, name=blob.name, what="integers")
    dtype = found[column]
    buffers = buffers_of(storage, name, schema, column)
    (counts, nulls), (places, _) = buffers.nodes[0], buffers.places[1]
    if nulls.any():
        raise _null(blob, f"document {int(nulls.argmax()):,}")
    starts = starts_of(counts)
    tokens = runs_of(blob, dtype, places=places, starts=starts)
    ends = DocumentEnds(starts[1:], num_tokens=int(starts[-1]), name=blob.name)
    return run_shard(tokens, dtype, len(counts), ends.between, name=blob.name)


@dataclass(frozen=True, slots=True)
class _Lists:
    """A column of lists in every batch; arrays are [batches]."""

    blob: Blob
    rows: Int64
    width: int
    """Bytes of an offset; 0 where all lists are of one length."""
    length: int
    """That length."""
    offsets: Int64
    """First byte of the offsets."""
    first: Int64
    """The first offset: the lists' first value in the buffer of values."""
    places: Int64
    """First byte of the tokens."""
    starts: Int64
    """[batches + 1] first token of each batch, then the number of tokens."""

    @classmethod
    def open(cls, blob: Blob, buffers: ColumnBuffers, *, kind: Any, dtype: str) -> "_Lists":  # Any: pyarrow
        item = np.dtype(dtype).itemsize
        fixed = pa.types.is_fixed_size_list(kind)
        width = 0 if fixed else 8 if pa.types.is_large_list(kind) else 4
        (rows, null_rows), (values, null_values) = buffers.nodes
        with reading(blob.name):
            offsets = buffers.places[1][0]
            if fixed:
                first, last = np.zeros_like(rows), rows * kind.list_size
            else:
                first, last = _edges(blob, offsets, rows, width)
            if (first < 0).any() or (last < first).any() or (last > values).any():
                raise Malformed("a list leads outside its record batch")
        length = kind.list_size if fixed else 0
        lists = cls(
            blob=blob,
            rows=rows,
            width=width,
            length=length,
            offsets=offsets,
            first=first,
            places=buffers.places[-1][0] + first * item,
            starts=starts_of(last - first),
        )
        lists._check_nulls(buffers, null_rows, null_values)
        return lists

    def ends_of(self, batch: int) -> DocumentEnds:
        """Return the ends of a batch's documents, counted from its first token."""
        rows, tokens = int(self.rows[batch]), int(self.starts[batch + 1] - self.starts[batch])
        return DocumentEnds(self._offsets(batch)[1 : rows + 1], num_tokens=tokens, name=self.blob.name)

    def _offsets(self, batch: int) -> npt.NDArray[Any]:  # Any: int32 or int64
        rows = int(self.rows[batch])
        if not self.width:
            return np.arange(rows + 1) * self.length
        found = self.blob.array(
            f"<i{self.width}", offset=int(self.offsets[batch]), count=rows + 1 if rows else 0
        )
        first = int(self.first[batch])
        part = found[0 : rows + 1]
        return part - part.dtype.type(first) if first else part

    def _check_nulls(self, buffers: ColumnBuffers, null_rows: Int64, null_values: Int64) -> None:
        """Refuse nulls among the tokens; a null list must hold nothing."""
        values_bits = buffers.places[-2]
        before = starts_of(self.rows)
        for batch in np.flatnonzero((null_rows > 0) | (null_values > 0)).tolist():
            offsets = self._offsets(batch).astype(np.int64)
            bad = np.zeros(int(self.rows[batch]), np.bool_)
            if null_rows[batch]:
                valid = self._bits(buffers.places[0], batch, 0, len(bad))
                bad |= ~valid & (np.diff(offsets) != 0)
            if null_values[batch]:
                first = int(self.first[batch])
                valid = self._bits(values_bits, batch, first, first + int(offsets[-1]))
                nulls = starts_of((~valid).astype(np.int64))
                bad |= nulls[offsets[1:]] != nulls[offsets[:-1]]
            if bad.any():
                raise _null(self.blob, f"row {int(before[batch]) + int(bad.argmax()):,}")

    def _bits(self, places: tuple[Int64, Int64], batch: int, start: int, stop: int) -> Bits:
        place, size = int(places[0][batch]), int(places[1][batch])
        with reading(self.blob.name):
            if size * 8 < stop:
                raise Malformed("a record batch says less about its nulls than it has values")
        raw = np.frombuffer(self.blob.read(place, place + -(-stop // 8)), np.uint8)
        return np.unpackbits(raw, bitorder="little", count=stop)[start:].astype(np.bool_)


def _edges(blob: Blob, offsets: Int64, rows: Int64, width: int) -> tuple[Int64, Int64]:
    """Return the first and the last offset of every batch; both 0 where a batch has no rows."""
    data = blob.array(np.uint8, offset=0, count=blob.size)
    read = partial(_read_at, data, width=width)
    first, last = np.zeros_like(rows), np.zeros_like(rows)
    held = np.flatnonzero(rows)
    first[held], last[held] = read(offsets[held]), read(offsets[held] + rows[held] * width)
    return first, last


def _read_at(data: Any, at: Int64, *, width: int) -> Int64:  # Any: Slices of bytes
    parts = [data[place : place + width] for place in at.tolist()]
    joined = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return joined.view(f"<i{width}").astype(np.int64)


def _null(blob: Blob, where: str) -> CorpusError:
    return CorpusError(
        f"{blob.name} has a null among the tokens of {where}", fix="A token has an id: make the file again."
    )

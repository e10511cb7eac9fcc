"""Collation: tokens of rows, labels, positions, document ids and columns; recycled batch memory.

Cost is memory traffic: tokens are gathered in their stored type, which stays in the processor's cache, and
widened into the batch once; labels are the same tokens shifted by one, corrected where documents end. Columns
of a corpus are read afterwards, over the same pieces: bits of local files in one compiled pass
(native/rows.c), everything else piece by piece.

Page faults make a fresh megabyte slower to allocate than to fill, and the allocator returns large blocks to
the system as soon as a batch is dropped. So buffers are kept, and one is reused once nothing but this pool
refers to it: an array, a view of it, or a tensor made from either keeps its buffer in use. This reads
CPython's reference counts, under its global lock. A ring of buffers would overwrite batches that are in use.
"""

import sys
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Int32, Int64, Table, Tokens, address
from penstock.data.corpus.columns import LEARNED, TokenColumn
from penstock.data.corpus.corpus import Corpus
from penstock.data.row_spans import StepSpans
from penstock.data.types import IGNORED_LABEL, PADDING
from penstock.storage.base import FarSlices, Slices

FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")


_INT64: np.dtype[Any] = np.dtype(np.int64)
CorpusSpans = Sequence[tuple[Corpus, list[Table]]]
Field = npt.NDArray[Any]  # Any: of the column


class BatchBuffers:
    """Recycled memory for arrays of a few shapes. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], list[tuple[npt.NDArray[Any], int]]] = {}
        self._lock = Lock()

    def take(
        self, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> tuple[npt.NDArray[Any], int]:  # Any: of the dtype asked for
        """Return an array that nothing else refers to, and its address; its contents are arbitrary."""
        with self._lock:
            kept = self._kept.setdefault((shape, dtype), [])
            for buffer, at in kept:
                if sys.getrefcount(buffer) == _FREE:
                    return buffer.view(), at
            buffer = np.empty(shape, dtype=dtype)
            at = address(buffer)
            if len(kept) < _KEPT:
                kept.append((buffer, at))
            return buffer.view(), at


def gather(
    compiled: CDLL,
    spans: StepSpans,
    *,
    length: int,
    fields: Sequence[str],
    buffers: BatchBuffers,
    dtype: np.dtype[Any] = _INT64,  # Any: int64 or int32
) -> dict[str, Int64 | Int32] | None:
    """Build the same fields as `collate` in one compiled pass; None if some rows are not in memory maps."""
    if (num_spans := spans.count(compiled)) is None:
        return None
    num_rows = spans.num_rows
    out: dict[str, Int64 | Int32] = {}
    at = dict.fromkeys(FIELDS, 0)
    for name in fields:
        if name == "cu_seqlens":
            ends = np.zeros(num_spans + 1, np.int32)
            out[name], at[name] = ends, address(ends) + ends.itemsize
        else:
            out[name], at[name] = buffers.take((num_rows, length), dtype)
    wrong = compiled.penstock_gather(
        *spans.at,
        num_rows,
        length,
        dtype.itemsize,
        at["input_ids"],
        at["labels"],
        at["position_ids"],
        at["document_ids"],
        at["cu_seqlens"],
    )
    assert not wrong, f"row {wrong - 1} does not hold {length} tokens"
    return out


def collate(
    parts: CorpusSpans,
    *,
    length: int,
    fields: Sequence[str],
    buffers: BatchBuffers,
    dtype: np.dtype[Any] = _INT64,  # Any: int64 or int32
) -> dict[str, Int64 | Int32]:
    """Build the requested fields of a batch of B rows.

    A label is the next token of the document; at the end of a piece it is the stored next token if the
    document continues, else -100. Padding is token 0 with label -100, in a document of its own.

    Args:
        parts: corpora and the piece tables (see PackedPool) of their rows, in batch order.
        length: tokens per row, L.
        buffers: source of the fields' memory.
        dtype: int64, or int32 if all token ids fit; `cu_seqlens` is int32 always.

    Returns:
        `input_ids`, `labels`, `position_ids` (restarting in each document) and `document_ids`
        (counting from 0 in each row): [B, L] of `dtype`; `cu_seqlens`: [documents + 1] int32, cumulative
        lengths over the flattened batch, with a boundary at every row's end.
    """
    num_rows = sum(len(rows) for _, rows in parts)
    pieces = np.concatenate([table for _, rows in parts for table in rows])
    stored = _gather(parts, pieces, length=length)
    out: dict[str, Int64 | Int32] = {}
    lengths = pieces[:, 2] - pieces[:, 1]
    ends = np.cumsum(lengths)
    for name in fields:
        if name == "cu_seqlens":
            out[name] = np.concatenate((np.zeros(1), ends)).astype(np.int32)
            continue
        out[name], _ = buffers.take((num_rows, length), dtype)
        flat = out[name].reshape(-1)
        if name == "input_ids":
            flat[:] = stored
        elif name == "labels":
            flat[:-1] = stored[1:]
            _end_labels(flat, parts, pieces, ends=ends)
        elif name == "position_ids":
            count = np.arange(length, dtype=dtype)
            np.concatenate([count[:n] for n in lengths.tolist()], out=flat)
        elif name == "document_ids":
            ordinals = [ordinal for _, rows in parts for table in rows for ordinal in range(len(table))]
            start = 0
            for ordinal, stop in zip(ordinals, ends.tolist(), strict=True):
                flat[start:stop] = ordinal
                start = stop
    return out


def _gather(parts: CorpusSpans, pieces: Table, *, length: int) -> Tokens:
    """Return the tokens of all rows, concatenated, in the stored type: [B * L].

    A slice of a memoryview costs 0.1 us, one of an array several times that; joining buffers beats
    concatenating arrays for the same reason.
    """
    shards, starts, stops, _ = pieces.T.tolist()
    dtype = np.result_type(*{corpus.manifest.dtype for corpus, rows in parts if rows})
    views: list[memoryview] = []
    first = 0
    for corpus, rows in parts:
        past = first + sum(map(len, rows))
        tokens: dict[int, Slices] = {
            shard: corpus.shard(shard).tokens if shard != PADDING else np.zeros(length, dtype)
            for shard in set(shards[first:past])
        }
        spans = zip(shards[first:past], starts[first:past], stops[first:past], strict=True)
        if all(_is_mapped(array, dtype) for array in tokens.values()):
            mapped = {shard: memoryview(array) for shard, array in tokens.items()}  # type: ignore[arg-type]
            views += [mapped[shard][start:stop] for shard, start, stop in spans]
        elif len(far := _far(tokens, dtype)) == len(tokens):
            views += next(iter(far.values())).views(far, spans)
        else:
            found = (tokens[shard][start:stop] for shard, start, stop in spans)
            views += [np.ascontiguousarray(array, dtype).data for array in found]
        first = past
    return np.frombuffer(b"".join(views), dtype=dtype)


def _far(tokens: Mapping[int, Slices], dtype: np.dtype[Any]) -> dict[int, FarSlices]:  # Any: of the tokens
    """Return the fetched shards whose stored type is the batch's."""
    return {
        shard: array
        for shard, array in tokens.items()
        if isinstance(array, FarSlices) and array.dtype == dtype
    }


def _is_mapped(tokens: Slices, dtype: np.dtype[Any]) -> bool:  # Any: of the tokens
    """Return True if a shard is a memory map of the batch's width; shards of one corpus may differ."""
    return isinstance(tokens, np.ndarray) and tokens.flags.c_contiguous and tokens.itemsize == dtype.itemsize


def _end_labels(labels: Int64 | Int32, parts: CorpusSpans, pieces: Table, *, ends: Int64) -> None:
    """Correct flat labels [B * L] at the ends of pieces, and set those of the padding to -100."""
    labels[ends - 1] = IGNORED_LABEL
    first = 0
    for corpus, rows in parts:
        past = first + sum(map(len, rows))
        for index in (np.flatnonzero(pieces[first:past, 3]) + first).tolist():
            shard, _, stop, _ = pieces[index].tolist()
            labels[ends[index] - 1] = corpus.shard(shard).tokens[stop : stop + 1][0]
        first = past
    for index in np.flatnonzero(pieces[:, 0] == PADDING).tolist():
        labels[ends[index] - pieces[index, 2] : ends[index]] = IGNORED_LABEL


_KEPT = 32  # buffers per shape: five fields of a batch in use and of five batches ahead


def _references_to_free() -> int:
    """Return the references that `take` counts for a free buffer; it depends on the Python version."""
    for buffer, _ in [(np.empty(0, dtype=np.uint8), 0)]:
        count = sys.getrefcount(buffer)
    return count


_FREE = _references_to_free()


def mask_labels(labels: Int64 | Int32, parts: CorpusSpans, *, compiled: CDLL | None) -> None:
    """Set the labels [B, L] that name a token that is not learned to -100.

    Args:
        parts: corpora and the piece tables of their rows, in batch order; a corpus without the column
            `learned` learns every token.
    """
    if compiled is not None and (pieces := _in_memory(parts, LEARNED)) is not None:
        compiled.penstock_bits(address(pieces), len(pieces), labels.itemsize, address(labels), 0)
        return
    flat = labels.reshape(-1)
    for first, column, (shard, start, stop) in _labelled(parts, LEARNED):
        flat[first : first + stop - start][~column.values(shard, start, stop)] = IGNORED_LABEL


def column_field(
    name: str,
    parts: CorpusSpans,
    *,
    length: int,
    buffers: BatchBuffers,
    compiled: CDLL | None,
) -> Field:
    """Return one column as a field: [B, L], or [B, L, width]; entry t is of the token that label t names.

    Args:
        parts: as for `mask_labels`; every corpus has the column, of one type and width.
        length: tokens per row, L.
    """
    num_rows = sum(len(rows) for _, rows in parts)
    column = next(corpus.columns[name] for corpus, rows in parts if rows)
    width = column.entry.width
    shape = (num_rows, length) if width == 1 else (num_rows, length, width)
    made, at = buffers.take(shape, column.dtype)
    is_bit = column.is_bit and compiled is not None
    if is_bit and compiled is not None and (pieces := _in_memory(parts, name)) is not None:
        compiled.penstock_bits(address(pieces), len(pieces), 0, 0, at)
        return made
    flat = made.reshape(num_rows * length, *shape[2:])
    flat[:] = 0
    for first, of, (shard, start, stop) in _labelled(parts, name):
        flat[first : first + stop - start] = of.values(shard, start, stop)
    return made


def _labelled(parts: CorpusSpans, name: str) -> Sequence[tuple[int, TokenColumn, tuple[int, int, int]]]:
    """Return (flat position of its first label, column, (shard, start, stop) of the labels) of each piece."""
    found, at = [], 0
    for corpus, rows in parts:
        column = corpus.columns.get(name)
        for table in rows:
            for shard, start, stop, goes_on in table.tolist():
                past = stop + goes_on
                if column is not None and shard != PADDING and past > start + 1:
                    found.append((at, column, (shard, start + 1, past)))
                at += stop - start
    return found


def _in_memory(parts: CorpusSpans, name: str) -> Int64 | None:
    """Return pieces [p, 4] for the compiled pass, the address of the shard's bits in place of the shard.

    None if some bits are fetched. The columns of the corpora keep the maps open.
    """
    tables = [table for _, rows in parts for table in rows]
    pieces: Int64 = np.concatenate(tables).astype(np.int64)
    first = 0
    for corpus, rows in parts:
        past = first + sum(map(len, rows))
        column, shards = corpus.columns.get(name), pieces[first:past, 0]
        if column is None:
            shards[:] = 0
        else:
            distinct, of = np.unique(shards, return_inverse=True)
            found = [0 if shard == PADDING else column.mapped(shard) for shard in distinct.tolist()]
            if None in found:
                return None
            shards[:] = np.array(found, np.int64)[of]
        first = past
    return pieces

"""Rows to arrays: one gather per batch, then labels and document fields by arithmetic on it.

Cost is memory traffic: tokens are gathered in their stored type, which stays in the processor's cache,
and widened into the batch once; labels are the same tokens shifted by one, mended where documents end.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.data.buffers import Buffers
from penstock.data.corpus import Corpus
from penstock.data.formats import Tokens
from penstock.data.pool import PADDING
from penstock.data.storage import FarSlices, Slices
from penstock.data.types import IGNORED_LABEL, Int32, Int64, Table

FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")


Parts = Sequence[tuple[Corpus, list[Table]]]


def collate(
    parts: Parts, *, length: int, fields: Sequence[str], buffers: Buffers
) -> dict[str, Int64 | Int32]:
    """Build the requested fields of a batch of B rows.

    Labels are the next token inside the document; where a piece ends it is the stored successor if
    that belongs to the same document, else -100. Padding is token 0, label -100, in a document of its
    own.

    Args:
        parts: corpora and the piece tables (see PackedPool) of the rows to read from each, in the
            order of the batch.
        length: tokens per row, L.
        buffers: where the fields' memory comes from.

    Returns:
        `input_ids`, `labels`, `position_ids` (restarting in each document) and `document_ids`
        (counting from 0 in each row): [B, L] int64; `cu_seqlens`: [documents + 1] int32, cumulative
        lengths over the flattened batch, with a break at every row's end.
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
        flat = buffers.take(num_rows * length, np.int64)
        out[name] = flat.reshape(num_rows, length)
        if name == "input_ids":
            flat[:] = stored
        elif name == "labels":
            flat[:-1] = stored[1:]
            _end_labels(flat, parts, pieces, ends=ends)
        elif name == "position_ids":
            count = np.arange(length)
            np.concatenate([count[:n] for n in lengths.tolist()], out=flat)
        elif name == "document_ids":
            ordinals = [ordinal for _, rows in parts for table in rows for ordinal in range(len(table))]
            start = 0
            for ordinal, stop in zip(ordinals, ends.tolist(), strict=True):
                flat[start:stop] = ordinal
                start = stop
    return out


def _gather(parts: Parts, pieces: Table, *, length: int) -> Tokens:
    """Return the tokens of all rows, end to end, in the stored type: [B * L].

    A slice of a memoryview costs a tenth of a microsecond, one of an array several times that; joining
    buffers beats concatenating arrays for the same reason.
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
    """Return those shards that are fetched and whose bytes are those of the batch."""
    return {
        shard: array
        for shard, array in tokens.items()
        if isinstance(array, FarSlices) and array.dtype == dtype
    }


def _is_mapped(tokens: Slices, dtype: np.dtype[Any]) -> bool:  # Any: of the tokens
    """Return whether bytes of a shard are those of the batch; shards of one corpus may differ in width."""
    return isinstance(tokens, np.ndarray) and tokens.flags.c_contiguous and tokens.itemsize == dtype.itemsize


def _end_labels(labels: Int64, parts: Parts, pieces: Table, *, ends: Int64) -> None:
    """Mend flat labels [B * L] where pieces end, and blank the padding."""
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

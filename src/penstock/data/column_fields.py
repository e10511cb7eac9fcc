"""Columns in a batch: labels of tokens that are not learned, and fields beside them.

Runs after `gather` or `collate` made the token fields, over the same pieces. Bits of local files are read in
one compiled pass (native/rows.c); everything else piece by piece, which is the plain reference.
"""

from collections.abc import Sequence
from ctypes import CDLL
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Int32, Int64
from penstock.data.collate import BatchBuffers, CorpusSpans
from penstock.data.corpus.columns import LEARNED, TokenColumn
from penstock.data.native import address
from penstock.data.order.pool import PADDING
from penstock.data.types import IGNORED_LABEL

Field = npt.NDArray[Any]  # Any: of the column


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

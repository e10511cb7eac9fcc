"""All documents of a corpus in rows, in corpus order: for a pass that computes values of every token.

Unlike a loader's epoch nothing is shuffled, and nothing is left over: documents are taken in blocks, packed
into rows of one length with padding, and each label's position in the corpus is known.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Table
from penstock.data.collate import BatchBuffers, collate, column_field, mask_labels
from penstock.data.corpus.columns import LEARNED
from penstock.data.corpus.corpus import Corpus
from penstock.data.packing import whole
from penstock.data.types import PADDING

FIELDS = ("input_ids", "labels", "position_ids", "cu_seqlens")


class CorpusRows:
    """Rows of a corpus, by blocks of documents.

    Args:
        length: tokens per row.
        cuts: True to cut longer documents into several pieces; False to leave them out.
        block_tokens: tokens of a block, at least.
        columns: columns to deliver besides the fields of a training step.
    """

    def __init__(
        self, corpus: Corpus, *, length: int, cuts: bool, block_tokens: int, columns: Sequence[str] = ()
    ) -> None:
        self._corpus, self._length, self._columns = corpus, length, tuple(columns)
        documents = corpus.fragments([(0, corpus.num_tokens)])
        starts, lengths = documents.starts, documents.lengths
        ends = starts + lengths
        if cuts:
            pieces = -(-lengths // length)
            nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            starts, ends = np.repeat(starts, pieces) + nth * length, np.repeat(ends, pieces)
        else:
            starts, ends = starts[lengths <= length], ends[lengths <= length]
        self._starts, self._stops = starts, np.minimum(starts + length, ends)
        self._goes_on = self._stops < ends
        self.left_out = len(documents) - len(starts) if not cuts else 0
        """Number of documents that are longer than a row and left out."""
        before = np.cumsum(self._stops - starts) - (self._stops - starts)
        self._blocks = np.flatnonzero(np.diff(before // block_tokens, prepend=-1))
        self._buffers = BatchBuffers()

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows, without padding."""
        return int((self._stops - self._starts).sum())

    def tables(self, block: int) -> list[Table]:
        """Return the pieces of each row of a block; see `PackedPool`."""
        last = self._blocks[block + 1] if block + 1 < len(self._blocks) else len(self._starts)
        of = slice(self._blocks[block], last)
        starts, stops, goes_on = self._starts[of], self._stops[of], self._goes_on[of]
        packed = whole.pack(stops - starts, num_rows=0, sequence_length=self._length)
        shards, inside = self._corpus.locate(starts[packed.fragment])
        table = np.stack((shards, inside, inside + packed.length, goes_on[packed.fragment]), 1)
        rows = np.split(table, packed.row_ends[:-1])
        return [self._padded(row) for row in rows]

    def batch(self, tables: Sequence[Table]) -> dict[str, npt.NDArray[Any]]:  # Any: of the fields
        """Return the fields of some rows, as a loader's batch."""
        parts = [(self._corpus, list(tables))]
        made: dict[str, npt.NDArray[Any]] = dict(
            collate(parts, length=self._length, fields=FIELDS, buffers=self._buffers)
        )
        if LEARNED in self._corpus.columns:
            mask_labels(made["labels"], parts, compiled=None)
        for name in self._columns:
            made[name] = column_field(name, parts, length=self._length, buffers=self._buffers, compiled=None)
        return made

    def labelled(self, tables: Sequence[Table]) -> Iterator[tuple[int, int, int]]:
        """Yield (flat position of the first label, its corpus position, number of labels) of each piece."""
        at = 0
        for table in tables:
            for shard, start, stop, goes_on in table.tolist():
                if shard != PADDING and (count := stop - start - 1 + goes_on):
                    yield at, int(self._corpus.starts[shard]) + start + 1, count
                at += stop - start

    def _padded(self, row: Table) -> Table:
        short = self._length - int((row[:, 2] - row[:, 1]).sum())
        return row if not short else np.concatenate((row, np.array([[PADDING, 0, short, 0]], row.dtype)))

"""Row groups of a Parquet file with a column of token lists, each decoded when it is needed, and kept."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Array, Int64, Tokens
from penstock.core.errors import CorpusError
from penstock.core.packages import Package
from penstock.data.formats.damaged import reading
from penstock.data.formats.decoded import DECODED
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.parquet_footer import GroupCounts
from penstock.data.formats.runs import starts_of
from penstock.data.formats.stored import served

pc = Package("pyarrow.compute", "Arrow and Parquet files")
pq = Package("pyarrow.parquet", "Arrow and Parquet files")

_BATCH_VALUES = 2**20


@dataclass(frozen=True, slots=True)
class Column:
    """A column of token lists in one file."""

    name: str
    """The file, for messages."""
    path: str
    metadata: Any  # pyarrow has no types
    column: str
    dtype: str
    counts: Sequence[GroupCounts]
    """Counts of each row group, from the footer."""

    def batches(self, group: int) -> Iterator[tuple[Int64, Array]]:
        """Yield the lengths of some lists and the tokens in them, a few megabytes at a time.

        Raises:
            CorpusError: the group is damaged, or has a null among its tokens.
        """
        counts = self.counts[group]
        first = sum(before.rows for before in self.counts[:group])
        size = min(max(_BATCH_VALUES * counts.rows // max(counts.values, 1), 1), 2**16)
        with (
            reading(self.name),
            pq.ParquetFile(
                self.path,
                metadata=self.metadata,
                memory_map=True,  # a size that lies is then no reason to allocate it
                page_checksum_verification=True,
            ) as file,
        ):
            for batch in file.iter_batches(
                size, row_groups=[group], columns=[self.column], use_threads=False
            ):
                yield self._content(batch.column(0), first)
                first += batch.num_rows

    def _content(self, lists: Any, first: int) -> tuple[Int64, Array]:  # Any: pyarrow has no types
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = lists.flatten()
        if values.null_count:
            at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            row = first + int(np.cumsum(lengths).searchsorted(at, "right"))
            raise CorpusError(
                f"{self.name} has a null among the tokens of row {row:,}",
                fix="A token has an id: make the file again.",
            )
        return lengths, values.to_numpy(zero_copy_only=False)


@dataclass(frozen=True, slots=True)
class Groups:
    """The row groups of one file; arrays are [groups]."""

    column: Column
    key: Hashable
    """Cache key of this content and column."""
    rows: Int64
    starts: Int64
    """[groups + 1] first token of each group, then the number of tokens."""

    def tokens(self, group: int, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of a group as they are served."""
        return self._decoded(group)[0][start:stop]

    def ends_of(self, group: int) -> DocumentEnds:
        """Return the ends of a group's documents, counted from its first token."""
        return self._decoded(group)[1]

    def _decoded(self, group: int) -> tuple[Tokens, DocumentEnds]:
        return DECODED.get(
            (self.key, group),
            lambda file: self._decode(group, file),
            lambda content: self._view(group, content),
        )

    def _view(self, group: int, content: npt.NDArray[np.uint8]) -> tuple[Tokens, DocumentEnds]:
        rows, count = int(self.rows[group]), int(self.starts[group + 1] - self.starts[group])
        dtype = served_type(self.column.dtype)
        ends = content[-8 * rows :].view(np.int64) if rows else np.zeros(0, np.int64)
        return content[: count * dtype.itemsize].view(dtype), DocumentEnds(
            ends, num_tokens=count, name=self.column.name
        )

    def _decode(self, group: int, file: BinaryIO) -> None:
        """Write the tokens of a group, padding to 8 bytes, and the ends of its documents."""
        lengths = [np.zeros(0, np.int64)]
        count = 0
        first = int(self.rows[:group].sum())
        for found, values in self.column.batches(group):
            before = first + sum(map(len, lengths))
            where = partial(_row_of, np.cumsum(found), before)
            tokens = served(values, self.column.dtype, name=self.column.name, where=where)
            file.write(tokens[0 : len(values)].tobytes())
            lengths.append(found)
            count += len(values)
        ends = starts_of(np.concatenate(lengths))[1:]
        if (len(ends), count) != (self.rows[group], self.starts[group + 1] - self.starts[group]):
            raise CorpusError(
                f"{self.column.name} has {count:,} tokens in {len(ends):,} rows from row {first:,} on, "
                "its footer says otherwise",
                fix="It is truncated or altered: restore it or make it again.",
            )
        file.write(bytes(-file.tell() % 8))
        file.write(ends.tobytes())


def _row_of(ends: Int64, first: int, position: int) -> str:
    return f"in row {first + int(ends.searchsorted(position, 'right')):,}"


def served_type(dtype: str) -> np.dtype[Any]:  # Any: uint16 or uint32
    """Return the type as which stored tokens are served.

    >>> str(served_type("int64"))
    'uint32'
    """
    return served(np.zeros(0, dtype), dtype, name="")[0:0].dtype

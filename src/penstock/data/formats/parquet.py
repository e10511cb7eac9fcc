"""Parquet files with a column of token lists: one row a document.

Row groups are decoded when one of their tokens is needed, and kept (see decoded.py). Opening reads the
footer alone: a row group's tokens are the values of its column less the nulls, which stand for empty
lists. Parquet cannot be read at a place inside a row group, so files whose groups hold some million tokens
are read well, and files of one group of a billion badly.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.core.packages import Package
from penstock.data.formats import Format, Options, StoredShard
from penstock.data.formats.choice import (
    COLUMN,
    absent_numbers,
    column_of,
    in_order,
    no_tokens,
    one_split,
    token_lists,
)
from penstock.data.formats.damaged import Malformed, reading
from penstock.data.formats.parquet_footer import group_counts
from penstock.data.formats.parquet_groups import Column, Groups, served_type
from penstock.data.formats.runs import GroupedEnds, TokenRuns, starts_of
from penstock.storage.base import Storage, probe

pa = Package("pyarrow", "Arrow and Parquet files")
pq = Package("pyarrow.parquet", "Arrow and Parquet files")

_SPLIT = re.compile(r"(?:.*/)?([\w.-]+?)-\d+-of-\d+[^/]*\.parquet")


def open_shard(storage: Storage, name: str, options: Options) -> StoredShard:
    """Open a file; reads its footer, and the whole column where that does not count its nulls.

    Raises:
        CorpusError: it is missing or truncated, or no column holds lists of integers.
        UsageError: which column holds the tokens is not clear.
    """
    blob = storage.open(name)
    path = str(blob.path())
    with reading(blob.name), pq.ParquetFile(path, memory_map=True) as file:
        schema, metadata = file.schema_arrow, file.metadata
        if len(set(schema.names)) < len(schema.names):
            raise pa.ArrowInvalid("two columns have one name")
        found = token_lists(schema)
    if not found:
        raise no_tokens(schema, options, name=blob.name)
    chosen = column_of(found, options, name=blob.name, what="lists of integers")
    with reading(blob.name):
        counts = group_counts(blob, chosen)
        total = sum(group.rows for group in counts)
        if (len(counts), total) != (metadata.num_row_groups, metadata.num_rows):
            raise Malformed(f"its row groups have {total:,} rows, its footer says {metadata.num_rows:,}")
    column = Column(blob.name, path, metadata, chosen, found[chosen], counts)
    rows = np.array([group.rows for group in counts], np.int64)
    tokens = np.array([_num_tokens(column, number) for number in range(len(counts))], np.int64)
    groups = Groups(column, (probe(storage, name), chosen), rows, starts_of(tokens))
    return StoredShard(
        TokenRuns(groups.starts, served_type(column.dtype), groups.tokens),
        int(rows.sum()),
        GroupedEnds(groups.starts, groups.ends_of).between,
    )


def find(sizes: Mapping[str, int]) -> list[str]:
    """Return the Parquet files; where their names tell splits (`train-00000-of-00008`), those of `train`.

    Raises:
        UsageError: there are several splits, and none is `train`.
    """
    names = in_order(name for name in sizes if name.endswith(".parquet"))
    splits: dict[str, list[str]] = {}
    for name in names:
        match = _SPLIT.fullmatch(name)
        splits.setdefault(match[1] if match else "", []).append(name)
    return names if "" in splits else one_split(splits)


def missing(storage: Storage, sizes: Mapping[str, int], shards: Sequence[str]) -> Iterator[str]:  # noqa: ARG001
    """Yield the files that the numbers in the files' names tell of and that are not there."""
    return absent_numbers(shards)


def _num_tokens(column: Column, group: int) -> int:
    counts = column.counts[group]
    if counts.nulls is not None:
        return counts.values - counts.nulls
    return sum(len(values) for _, values in column.batches(group))


PARQUET = Format(open_shard=open_shard, find=find, missing=missing, options=COLUMN)

"""Penstock's own shards: an Arrow IPC file with one large-list column of token ids.

The list offsets are the document index and the list values are the flat tokens, so a shard needs
no sidecar, is read in place, and opens as it is in pyarrow, Polars, DuckDB and Hugging Face datasets.
There is exactly one record batch: the values must be one contiguous run. Opening a shard reads the two ends
of its file; the rest is read where it is needed, which is what makes a far one cheap to open.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Tokens, address
from penstock.core.errors import CorpusError
from penstock.core.packages import Package
from penstock.data.formats import Format, Options, StoredShard
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.ipc import buffers_of, schema_of
from penstock.data.native import library
from penstock.storage.base import Blob, Storage

pa = Package("pyarrow", "Arrow and Parquet files")

COLUMN = "tokens"
_AHEAD_BYTES = 2**22  # of document ends, which are searched: page by page a disk would take long


def open_shard(storage: Storage, name: str, options: Options) -> StoredShard:  # noqa: ARG001
    """Open a shard in place; it costs address space, not memory, until tokens are touched.

    Raises:
        CorpusError: the file is missing, truncated, or not a Penstock shard.
    """
    blob = storage.open(name)
    schema = schema_of(blob)
    dtype = _dtype(schema.field(0).type) if schema.names == [COLUMN] else None
    found = buffers_of(storage, name, schema, COLUMN) if dtype is not None else None
    if dtype is None or found is None or len(found.rows) != 1:
        raise _broken(blob, f"expected one record batch with the column {COLUMN!r} alone, of lists of tokens")
    (documents, no_list), (num_tokens, no_token) = ((int(n[0]), int(nulls[0])) for n, nulls in found.nodes)
    (index_at, index_bytes), (tokens_at, _) = (
        (int(at[0]), int(size[0])) for at, size in (found.places[1], found.places[3])
    )
    if no_list or no_token:
        raise _broken(blob, "a document or a token is null")
    if index_bytes < 8 * (documents + 1):  # as it may be where there is no document
        raise _broken(blob, "its buffers are shorter than its lengths say")
    offsets = blob.array(np.int64, offset=index_at, count=documents + 1)
    if (first := int(offsets[0:1][0])) != 0:
        raise _broken(blob, f"its document offsets begin at {first} instead of 0")
    ends = blob.array(np.int64, offset=index_at + 8, count=documents)
    tokens = blob.array(dtype, offset=tokens_at, count=num_tokens)
    if isinstance(ends, np.ndarray) and ends.nbytes <= _AHEAD_BYTES and (compiled := library()) is not None:
        asked = np.array((address(ends), ends.nbytes), dtype=np.int64)
        compiled.penstock_read_ahead(address(asked), 1)
    found_ends = DocumentEnds(ends, num_tokens=num_tokens, name=blob.name)
    return StoredShard(tokens, documents, found_ends.between)


def write_shard(path: Path, tokens: Tokens, offsets: npt.NDArray[np.int64]) -> None:
    """Write a shard; the same input gives the same bytes. Not atomic: the caller renames.

    Args:
        tokens: [n] uint16 or uint32, all documents end to end.
        offsets: [documents + 1] int64, rising from 0 to n.
    """
    column = pa.LargeListArray.from_arrays(_array(offsets), _array(tokens))
    batch = pa.record_batch([column], names=[COLUMN])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _array(numbers: npt.NDArray[Any]) -> Any:  # Any: pyarrow has no types
    """Return an Arrow array over the numbers; `pa.array` would import pandas where it is installed: 0.5 s."""
    content = pa.py_buffer(np.ascontiguousarray(numbers))
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, content])


def _dtype(column: Any) -> np.dtype[np.uint16] | np.dtype[np.uint32] | None:  # Any: pyarrow has no types
    if column == pa.large_list(pa.uint16()):
        return np.dtype(np.uint16)
    return np.dtype(np.uint32) if column == pa.large_list(pa.uint32()) else None


def _broken(blob: Blob, problem: str) -> CorpusError:
    return CorpusError(
        f"Shard {blob.name} cannot be read: {problem}",
        fix="It is truncated or altered: restore it or prepare the corpus again.",
    )


ARROW = Format(open_shard=open_shard)

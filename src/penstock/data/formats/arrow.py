"""Penstock's own shards: an Arrow IPC file with one large-list column of token ids.

The list offsets are the document index and the list values are the flat tokens, so a shard needs
no sidecar, is read in place through a memory map, and opens as it is in pyarrow, Polars, DuckDB and
Hugging Face datasets. There is exactly one record batch: the values must be one contiguous run.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.errors import CorpusError
from penstock.data.formats import Options, Tokens
from penstock.data.storage import Storage

COLUMN = "tokens"


class ArrowShard:
    """A memory-mapped shard; costs address space, not memory, until tokens are touched."""

    def __init__(self, offsets: npt.NDArray[np.int64], values: Tokens) -> None:
        self.num_tokens = len(values)
        self.num_documents = len(offsets) - 1
        self.tokens = values
        self._offsets = offsets

    def document_ends(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the ends e of documents with start < e <= stop; repeats are empty documents."""
        first, past = self._offsets.searchsorted((start, stop), "right")
        return self._offsets[first:past]


def open_shard(storage: Storage, name: str, options: Options) -> ArrowShard:  # noqa: ARG001
    """Map a shard into memory.

    Raises:
        CorpusError: the file is missing, truncated, or not a Penstock shard.
    """
    path = storage.open(name).path()
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            if reader.schema.names != [COLUMN] or reader.num_record_batches != 1:
                raise pa.ArrowInvalid(f"expected one record batch with the column {COLUMN!r} alone")
            column = reader.get_batch(0).column(0)
            offsets = column.offsets.to_numpy(zero_copy_only=True)
            values = column.values.to_numpy(zero_copy_only=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorpusError(
            f"Shard {path} cannot be read: {error}",
            fix="It is truncated or altered: restore it or prepare the corpus again.",
        ) from None
    if offsets[0] != 0 or offsets[-1] != len(values):
        raise CorpusError(
            f"Shard {path} has document offsets that do not run from 0 to its {len(values)} tokens",
            fix="Restore it or prepare the corpus again.",
        )
    return ArrowShard(offsets, values)


def write_shard(path: Path, tokens: Tokens, offsets: npt.NDArray[np.int64]) -> None:
    """Write a shard; the same input gives the same bytes. Not atomic: the caller renames.

    Args:
        tokens: [n] uint16 or uint32, all documents end to end.
        offsets: [documents + 1] int64, rising from 0 to n.
    """
    column = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(tokens))
    batch = pa.record_batch([column], names=[COLUMN])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)

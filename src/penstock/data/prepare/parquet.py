"""Rows of a Parquet file as records, a few megabytes at a time."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.units import mib
from penstock.data.prepare.documents import Document, ReadOptions, Record, Rejection, document_of
from penstock.data.prepare.plan import InputFile

_BATCH_BYTES = 4 * 2**20


def read_parquet(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    """Yield the rows of one column from row `start` on; row groups before it are not read."""
    index = 0
    try:
        # Buffered, so that a column chunk is read page by page and not as a whole.
        table = pq.ParquetFile(handle, buffer_size=2**20, pre_buffer=False)
        if problem := _unusable(table.schema_arrow, options.text_column):
            yield Record(0, problem, file.bytes)
            return
        total = max(table.metadata.num_rows, 1)
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if index + rows <= start:
                index += rows
                continue
            size = _batch_rows(table.metadata.row_group(group))
            for batch in table.iter_batches(size, row_groups=[group], columns=[options.text_column]):
                for content in _contents(batch.column(0), options):
                    yield Record(index, content, file.bytes * (index + 1) // total)
                    index += 1
    except (pa.ArrowException, OSError) as error:
        reason = f"nothing can be read after row {index}: {str(error).splitlines()[0]}"
        yield Record(index, Rejection("unreadable", reason, whole_file=True), file.bytes)


def _unusable(schema: Any, column: str) -> Rejection | None:  # Any: pyarrow has no types
    if column not in schema.names:
        have = ", ".join(schema.names[:8])
        return Rejection("missing_field", f"no column {column!r}; the file has: {have}", whole_file=True)
    kind = schema.field(column).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text):
        return None
    return Rejection("not_text", f"column {column!r} holds {kind}, not strings", whole_file=True)


def _batch_rows(group: Any) -> int:  # Any: pyarrow has no types
    """Return how many average rows fill a batch, so that large documents come one by one."""
    return int(min(max(_BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1), 1), 8192))


def _contents(
    column: Any, options: ReadOptions
) -> Iterator[Document | Rejection]:  # Any: pyarrow has no types
    for value in column:
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            yield Rejection("undecodable", f"not utf-8 at byte {error.start}")
            continue
        if text is None:
            yield Rejection("not_text", f"column {options.text_column!r} holds null")
            continue
        document = document_of(text)
        if isinstance(document, Document) and document.num_bytes > options.max_document_bytes:
            yield Rejection("too_large", f"{mib(document.num_bytes)} of text")
        else:
            yield document

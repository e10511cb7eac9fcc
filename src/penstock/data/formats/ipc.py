"""Where the record batches of an Arrow IPC file or stream lie, and one integer column in all of them.

pyarrow reads the schema; the batches' metadata is read here, because a file may have 100,000 batches
and because a damaged one must end in a message and not in a crash. Values are read in place: buffers
that are compressed are refused (arrow.apache.org/docs/format/Columnar.html, "Serialization and IPC").
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.errors import CorpusError
from penstock.data.formats.damaged import Malformed, reading
from penstock.data.formats.ipc_tables import Tables
from penstock.data.storage import Blob
from penstock.data.types import Int64

_MAGIC = b"ARROW1"
_CONTINUED = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("", "<i4"), ("body", "<i8")])
_NOT_MEASURED = (
    pa.types.is_union,
    pa.types.is_run_end_encoded,
    pa.types.is_string_view,
    pa.types.is_binary_view,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
_MAX_METADATA = 2**28  # a schema of a million columns; a length beyond it is damage


@dataclass(frozen=True, slots=True)
class Messages:
    """The record batches of a file; arrays are [batches]."""

    schema: Any  # pyarrow has no types
    metadata: Int64
    """First byte of each batch's metadata, after its length."""
    metadata_bytes: Int64
    body: Int64
    """First byte of each batch's buffers."""
    body_bytes: Int64


@dataclass(frozen=True, slots=True)
class Buffers:
    """One column of every batch; arrays are [batches], places are bytes from the start of the file."""

    rows: Int64
    nodes: tuple[tuple[Int64, Int64], ...]
    """(length, nulls) of the column, then of what it is made of."""
    places: tuple[tuple[Int64, Int64], ...]
    """(first byte, bytes) of its buffers, in the order of the Arrow format."""


def messages_of(blob: Blob) -> Messages:
    """Find the record batches of an Arrow file, or of an Arrow stream.

    Raises:
        CorpusError: it is damaged, or it is no Arrow file.
    """
    with reading(blob.name):
        is_file = blob.size >= 8 and blob.read(0, 6) == _MAGIC
        messages = _file_messages(blob) if is_file else _stream_messages(blob)
        starts, ends = messages.body, messages.body + messages.body_bytes
        if (messages.body_bytes < 0).any() or (starts < 0).any() or (ends > blob.size).any():
            raise Malformed("a record batch leads outside the file")
        return messages


def buffers_of(blob: Blob, messages: Messages, column: str) -> Buffers:
    """Read where one column lies in every batch.

    Raises:
        CorpusError: the metadata is damaged, or the buffers are compressed.
    """
    with reading(blob.name):
        index = messages.schema.names.index(column)
        before = [_layout(field.type) for field in list(messages.schema)[:index]]
        nodes, buffers = _layout(messages.schema.field(index).type)
        node, buffer = sum(n for n, _ in before), sum(b for _, b in before)
        if not len(messages.body):
            none = np.zeros(0, np.int64)
            return Buffers(none, ((none, none),) * nodes, ((none, none),) * buffers)
        batches = _batch_tables(blob, messages)
        listed, placed = batches.vector(1), batches.vector(2)
        return Buffers(
            batches.number(0, "<i8"),
            tuple(_pair(batches, listed, node + n) for n in range(nodes)),
            tuple(_placed(batches, placed, buffer + n, messages) for n in range(buffers)),
        )


def _batch_tables(blob: Blob, messages: Messages) -> Tables:
    data = blob.array(np.uint8, offset=0, count=blob.size)
    first, past = messages.metadata, messages.metadata + messages.metadata_bytes
    if (first < 0).any() or (past < first).any() or (past > blob.size).any():
        raise Malformed("a record batch leads outside the file")
    parts = [data[start:stop] for start, stop in zip(first.tolist(), past.tolist(), strict=True)]
    roots = Tables.roots(np.concatenate(parts), messages.metadata_bytes)
    if (roots.number(1, "<u1") != _BATCH).any():
        raise Malformed("a block is no record batch")
    batches = roots.table(2)
    if batches.has(3).any():
        raise Malformed(
            "its buffers are compressed, and cannot be read in place: write it without compression"
        )
    return batches


def _pair(batches: Tables, vector: tuple[Int64, Int64], index: int) -> tuple[Int64, Int64]:
    first, second = (batches.item(vector, index, size=16, part=part) for part in (0, 8))
    if (first < 0).any() or (second < 0).any():
        raise Malformed("a record batch has a negative length")
    return first, second


def _placed(
    batches: Tables, vector: tuple[Int64, Int64], index: int, messages: Messages
) -> tuple[Int64, Int64]:
    offset, size = _pair(batches, vector, index)
    if (offset > messages.body_bytes).any() or (size > messages.body_bytes - offset).any():
        raise Malformed("a buffer leads outside its record batch")
    return messages.body + offset, size


def _file_messages(blob: Blob) -> Messages:
    if blob.size < 24 or blob.read(blob.size - 6, blob.size) != _MAGIC:
        raise Malformed("the end of an Arrow file is missing")
    (size,) = struct.unpack("<i", blob.read(blob.size - 10, blob.size - 6))
    if not 0 < size <= blob.size - 18:
        raise Malformed("its footer leads outside the file")
    raw = np.frombuffer(blob.read(blob.size - 10 - size, blob.size - 10), np.uint8)
    footer = Tables.roots(raw, np.array([size], np.int64))
    schema = _schema(blob, 8)
    if not footer.has(3)[0]:
        return _messages(schema, [])
    (at,), (count,) = footer.vector(3)
    if at + count * _BLOCK.itemsize > size:
        raise Malformed("its footer is cut off")
    blocks = raw[at : at + count * _BLOCK.itemsize].view(_BLOCK)
    offset, whole = blocks["offset"].astype(np.int64), blocks["metadata"].astype(np.int64)
    if (whole < 8).any() or (offset < 8).any() or (offset > blob.size).any():
        raise Malformed("a record batch leads outside the file")
    return Messages(schema, offset + 8, whole - 8, offset + whole, blocks["body"].astype(np.int64))


def _stream_messages(blob: Blob) -> Messages:
    schema = _schema(blob, 0)
    found = []
    at = 0
    # A stream may end without its mark; every writer sets it, and without it a lost batch is not noticed.
    while size := _metadata_bytes(blob, at):
        kind, body = _head(blob.read(at + 8, at + 8 + size))
        if kind == _BATCH:
            found.append((at + 8, size, at + 8 + size, body))
        elif kind not in (_SCHEMA, _DICTIONARY):
            raise Malformed(f"it has a message of an unknown kind at byte {at}")
        if body < 0:
            raise Malformed(f"the message at byte {at} leads outside the file")
        at += 8 + size + body
    return _messages(schema, found)


def _messages(schema: Any, found: list[tuple[int, int, int, int]]) -> Messages:  # Any: pyarrow has no types
    return Messages(schema, *np.array(found, np.int64).reshape(-1, 4).T.copy())


def _schema(blob: Blob, at: int) -> Any:  # pyarrow has no types
    size = _metadata_bytes(blob, at)
    message = blob.read(at, at + 8 + size)
    if not size or _head(message[8:])[0] != _SCHEMA:
        raise Malformed("it does not begin with an Arrow schema")
    schema = pa.ipc.read_schema(pa.py_buffer(message))
    str(schema)  # fails here, and not where it is used, if a name in it is no text
    if len(set(schema.names)) < len(schema.names):
        raise Malformed("two columns have one name")
    return schema


def _metadata_bytes(blob: Blob, at: int) -> int:
    """Return the size of a message's metadata; 0 at the end of a stream."""
    if at + 8 > blob.size:
        raise Malformed("it ends in the middle of a message, or is no Arrow file")
    mark, size = struct.unpack("<II", blob.read(at, at + 8))
    if mark != _CONTINUED or size > min(_MAX_METADATA, blob.size - at - 8):
        raise Malformed(f"there is no Arrow message at byte {at}")
    return int(size)


def _head(metadata: bytes) -> tuple[int, int]:
    """Return the kind of a message and the size of its body."""
    if len(metadata) < 8:
        raise Malformed("a message is too short")
    (root,) = struct.unpack_from("<I", metadata)
    (back,) = struct.unpack_from("<i", metadata, root)
    vtable = root - back
    if not 0 <= vtable <= len(metadata) - 12:
        raise Malformed("an offset leads outside its message")
    size, _, _, kind, _, body = struct.unpack_from("<6H", metadata, vtable)
    if size < 10 or not kind:
        raise Malformed("a message lacks its head")
    held = size >= 12 and body
    return metadata[root + kind] if root + kind < len(metadata) else 0, (
        struct.unpack_from("<q", metadata, root + body)[0] if held else 0
    )


def _layout(kind: Any) -> tuple[int, int]:  # pyarrow has no types
    """Return how many nodes and buffers a column of a type has."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _layout(kind.storage_type)
    if any(is_kind(kind) for is_kind in _NOT_MEASURED):
        raise CorpusError(
            f"A column of type {kind} lies before the column of tokens, which cannot then be found",
            fix="Write the files again with the tokens' column alone.",
        )
    if types.is_null(kind):
        return 1, 0
    own = 1 if types.is_struct(kind) or types.is_fixed_size_list(kind) else 2
    if (
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
    ):
        own = 3
    inner = [_layout(kind.field(n).type) for n in range(kind.num_fields)]
    return 1 + sum(n for n, _ in inner), own + sum(b for _, b in inner)

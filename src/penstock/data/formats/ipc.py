"""Find where one column lies in the record batches of an Arrow IPC file or stream; no values are read.

pyarrow tells the address of a buffer in memory, not its place in a file. So it reads each message in
reserved memory as large as the file, which holds the message's metadata and zeros where its values would be.
The distance of a buffer from the start of that memory is its distance from the start of the message in the
file. Only metadata is read, of local and remote files alike, and damaged values do no harm. An Arrow
file is a stream between its magic and its footer, and read as one.

Values are read in place: buffers that are compressed are refused
(arrow.apache.org/docs/format/Columnar.html, "Serialization and IPC").
"""

import hashlib
import mmap
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core import config
from penstock.core.arrays import Int64
from penstock.core.packages import Package
from penstock.data.formats.damaged import Malformed, reading
from penstock.data.formats.index_cache import keep, kept
from penstock.storage.base import Blob, Storage, probe

pa = Package("pyarrow", "Arrow and Parquet files")

_MAGIC = b"ARROW1"
_CONTINUED = 0xFFFFFFFF
_MAX_METADATA = 2**28  # a schema of a million columns; a length beyond it is damage
_MAX_PADDING = 64  # between the end of a stream and the footer; a batch takes more
_MANY = 1024  # batches; where they are so many, their places are kept in the index cache
_DIGEST_BYTES = 16
# MAP_NORESERVE, which Python's mmap does not name: memory that is never touched counts for nothing.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


@dataclass(frozen=True, slots=True)
class ColumnBuffers:
    """One column of every batch; arrays are [batches], places are bytes from the start of the file.

    Every buffer lies in the file and is as long as its values take; what they are is not known.
    """

    rows: Int64
    """Number of rows of the batch."""
    nodes: tuple[tuple[Int64, Int64], ...]
    """(length, 1 if some may be null) of the column, then of what its lists hold."""
    places: tuple[tuple[Int64, Int64], ...]
    """(first byte, bytes) of its buffers, in the order of the Arrow format; zeros where there is none."""


def schema_of(blob: Blob) -> Any:  # pyarrow has no types
    """Return the schema of an Arrow file, or of an Arrow stream.

    Raises:
        CorpusError: it is damaged, or it is no Arrow file.
    """
    with reading(blob.name):
        at, _ = _bounds(blob)
        schema = pa.ipc.read_schema(pa.py_buffer(blob.read(at, at + 8 + _metadata_bytes(blob, at))))
        str(schema)  # fails here, and not where it is used, if a name in it is no text
        if len(set(schema.names)) < len(schema.names):
            raise Malformed("two columns have one name")
        return schema


def buffers_of(storage: Storage, name: str, schema: Any, column: str) -> ColumnBuffers:  # Any: pyarrow
    """Read where one column lies in every batch of a file.

    Raises:
        CorpusError: the metadata is damaged, or the buffers are compressed.
    """
    blob = storage.open(name)
    with reading(blob.name):
        index = schema.names.index(column)
        kind = schema.field(index).type
        rows, *numbers = np.ascontiguousarray(_numbers_of_batches(storage, name, blob, schema, index).T)
        pairs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        nodes, places = pairs[: 1 + kind.num_fields], pairs[1 + kind.num_fields :]
        if (nodes[0][0] != rows).any():
            raise Malformed("a record batch has a column of another length")
        if any((first < 0).any() or (first > blob.size - size).any() for first, size in places):
            raise Malformed(_COMPRESSED)  # for which pyarrow takes memory of its own
        return ColumnBuffers(rows, nodes, places)


def _numbers_of_batches(storage: Storage, name: str, blob: Blob, schema: Any, index: int) -> Int64:
    """Return [batches, numbers]: rows, and what _numbers returns; as they were kept, or found now."""
    width = 1 + len(_numbers(pa.nulls(0, schema.field(index).type), 0))
    plain = pa.schema([_as_stored(field) for field in schema])
    found: list[tuple[int, ...]] = []
    file = ""
    for batch, base in _batches(blob, plain):
        found.append((batch.num_rows, *_numbers(batch.column(index), base)))
        if len(found) == _MANY:
            key = config.fingerprint([probe(storage, name), index])
            file = f"{name.replace('/', '+')[-80:]}-{key}.batches"
            if (held := _read(kept(storage, file), width)) is not None:
                return held
    numbers = np.array(found, np.int64).reshape(-1, width)
    if file:
        content = numbers.astype("<i8").tobytes()
        with suppress(OSError):  # without it, opening takes longer and nothing else
            keep(storage, file, lambda out: out.write(_digest(content) + content))
    return numbers


def _read(path: Path | None, width: int) -> Int64 | None:
    """Return the numbers that were kept in a file; None where there is none, or it is damaged."""
    content = b""
    with suppress(OSError):
        content = path.read_bytes() if path else b""
    digest, numbers = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return (
        np.frombuffer(numbers, "<i8").reshape(-1, width) if content and digest == _digest(numbers) else None
    )


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


_COMPRESSED = "its buffers are compressed, and cannot be read in place: write it without compression"


def _as_stored(field: Any) -> Any:  # pyarrow has no types
    return field.with_type(field.type.index_type) if pa.types.is_dictionary(field.type) else field


def _numbers(column: Any, base: int) -> list[int]:  # Any: pyarrow has no types
    """Return the numbers of a column in one batch: its nodes', then its buffers'; see ColumnBuffers."""
    column.validate()  # no length is negative, every buffer as long as its values take
    buffers = column.buffers()
    numbers = [len(column), buffers[0] is not None]
    if column.type.num_fields:
        numbers += [len(column.values), buffers[-2] is not None]
    for buffer in buffers:
        numbers += (buffer.address - base, buffer.size) if buffer is not None and buffer.size else (0, 0)
    return numbers


def _batches(blob: Blob, schema: Any) -> Iterator[tuple[Any, int]]:  # Any: pyarrow has no types
    """Yield each record batch without its values, and the address at which the file would begin.

    A batch stands only until the next one is asked for.
    """
    at, footer = _bounds(blob)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, blob.size, flags=flags)
    whole, filled = pa.py_buffer(memory), 0
    # A stream may end without its mark; every writer sets it, and without it a lost batch is not noticed.
    while size := _metadata_bytes(blob, at):
        filled = max(filled, 8 + size)  # zeros over what is left of a longer message
        memory[:filled] = blob.read(at, at + 8 + size).ljust(filled, b"\0")
        message = pa.ipc.read_message(whole.slice(0, blob.size - at))
        if message.type == "record batch":
            try:
                batch = pa.ipc.read_record_batch(message, schema)
            except (pa.ArrowException, OSError) as error:
                raise Malformed(_COMPRESSED) if "ecompress" in str(error) else error from None
            yield batch, whole.address - at
        elif message.type not in ("schema", "dictionary"):
            raise Malformed(f"it has a message of an unknown kind at byte {at}")
        at += 8 + size + message.body.size
    if footer is not None and not 0 <= footer - (at + 8) <= _MAX_PADDING:
        raise Malformed(f"its batches end at byte {at}, its footer begins at byte {footer}")


def _bounds(blob: Blob) -> tuple[int, int | None]:
    """Return the first byte of the first message, and of the footer where there is one."""
    if blob.size < 8 or blob.read(0, 6) != _MAGIC:
        return 0, None
    if blob.size < 24 or blob.read(blob.size - 6, blob.size) != _MAGIC:
        raise Malformed("the end of an Arrow file is missing")
    (size,) = struct.unpack("<i", blob.read(blob.size - 10, blob.size - 6))
    if not 0 < size <= blob.size - 18:
        raise Malformed("its footer leads outside the file")
    return 8, blob.size - 10 - size


def _metadata_bytes(blob: Blob, at: int) -> int:
    """Return the size of a message's metadata; 0 at the end of a stream."""
    if at + 8 > blob.size:
        raise Malformed("it ends in the middle of a message, or is no Arrow file")
    mark, size = struct.unpack("<II", blob.read(at, at + 8))
    if mark != _CONTINUED or size > min(_MAX_METADATA, blob.size - at - 8):
        raise Malformed(f"there is no Arrow message at byte {at}")
    return int(size)

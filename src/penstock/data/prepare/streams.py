"""Bytes of plain and compressed files in chunks, and lines of any length in bounded memory."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Protocol, cast

import pyarrow as pa

CHUNK_BYTES = 2**20

BROKEN_STREAM = (OSError, EOFError, zlib.error, pa.ArrowException)
"""What reading a damaged or truncated compressed file raises."""


class Readable(Protocol):
    """Anything with `read(size)`."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; nothing at the end."""


def open_stream(path: str, handle: BinaryIO) -> Readable:
    """Return the content of an open file, decompressed if its name ends in .gz or .zst."""
    name = path.lower()
    if name.endswith(".gz"):
        return cast("Readable", gzip.GzipFile(fileobj=handle))
    if name.endswith(".zst"):
        return cast("Readable", pa.CompressedInputStream(pa.PythonFile(handle, "r"), "zstd"))
    return handle


def chunks(stream: Readable) -> Iterator[bytes]:
    """Yield a stream's bytes in pieces of at most CHUNK_BYTES."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def split_lines(pieces: Iterable[bytes], *, limit: int) -> Iterator[bytes | int]:
    """Yield each line without its newline, or only its length where that is above `limit`.

    Memory stays below the limit and one piece, however long a line is.

    >>> list(split_lines([b"ab\\ncd", b"ef", b"\\n\\nx"], limit=3))
    [b'ab', 4, b'', b'x']
    """
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            size += len(end)
            yield b"".join((*parts, end)) if size <= limit else size
            parts, size = [], 0
        size += len(rest)
        if size <= limit:
            parts.append(rest)
        else:
            parts.clear()
    if size:
        yield b"".join(parts) if size <= limit else size

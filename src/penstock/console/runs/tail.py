"""New lines of a growing file that may be cut, rewritten or replaced while it is read.

A reader keeps a `FilePosition`: how many bytes it has consumed, and a digest of the last of them. A file
that is shorter, or has other bytes there, was rewritten (a resumed run drops records, a user edits) and is
read from its start. That a file was replaced by one with the same history goes unnoticed, and need not be.

A line is consumed once its end is there. Memory is bounded: a chunk is read at a time, and a line longer
than a chunk, which no run writes, is dropped and counted. A chunk is handed over in pieces, so that others
who ask for the run wait for a piece only.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

CHUNK_BYTES = 8 << 20
PIECE_BYTES = 256 << 10
"""Bytes of a piece: some 10 ms of parsing lines as JSON."""
_CHECKED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FilePosition:
    """Position in a file."""

    offset: int = 0
    """Bytes consumed."""
    digest: str = ""
    """Of the last bytes before it."""
    is_inside: bool = False
    """True inside a line that is dropped, because it is too long."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole lines that were read together."""

    content: bytes
    """The lines, each with its end."""
    offset: int
    """Bytes of the file before the first."""
    mark: FilePosition
    """Position after them."""
    num_dropped: int = 0
    """Lines that were too long."""

    @property
    def lines(self) -> list[bytes]:
        """The lines without their ends."""
        return self.content.split(b"\n")[:-1]


def is_continued(file: BinaryIO, mark: FilePosition) -> bool:
    """Return whether a file still begins with what was consumed, as far as the digest tells."""
    file.seek(0, 2)
    return file.tell() >= mark.offset and _digest(file, mark.offset) == (mark.digest or _digest(file, 0))


def pieces(
    file: BinaryIO, mark: FilePosition, *, chunk_bytes: int = CHUNK_BYTES, piece_bytes: int = PIECE_BYTES
) -> Iterator[Piece]:
    """Yield the complete lines after a position; a chunk is read at a time.

    Args:
        file: open for reading.
        mark: position after what was consumed.
        chunk_bytes: read at once, and the longest line that is kept.
        piece_bytes: of a piece at most, unless a single line is longer.
    """
    offset, is_inside = mark.offset, mark.is_inside
    while True:
        file.seek(offset)
        chunk = file.read(chunk_bytes)
        end, dropped = chunk.rfind(b"\n") + 1, 0
        if not end and len(chunk) < chunk_bytes:
            return
        if not end:  # a line that is longer than a chunk
            dropped = int(not is_inside)
            offset += len(chunk)
            is_inside = True
            yield Piece(b"", offset, FilePosition(offset, _digest(file, offset), is_inside), dropped)
            continue
        first = 0
        while first < end:
            past = chunk.rfind(b"\n", first, first + piece_bytes) + 1
            past = past or chunk.find(b"\n", first) + 1
            begin = chunk.find(b"\n", first) + 1 if is_inside else first
            is_inside = False
            has_tail = past >= _CHECKED_BYTES or not offset
            tail = _digest_of(chunk[max(0, past - _CHECKED_BYTES) : past]) if has_tail else None
            mark = FilePosition(offset + past, tail or _digest(file, offset + past))
            yield Piece(chunk[begin:past], offset + begin, mark)
            first = past
        offset += end


def _digest(file: BinaryIO, offset: int) -> str:
    first = max(0, offset - _CHECKED_BYTES)
    file.seek(first)
    return _digest_of(file.read(offset - first))


def _digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()

"""Bytes of an input file: decompressed, as UTF-8, and cut into lines."""

import codecs
import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import BinaryIO, Final, cast

import pyarrow as pa

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHUNK_BYTES = 2**20

MIN_ZSTD_LONG, ZSTD_LONG, MAX_ZSTD_LONG = 10, 27, 31
"""Largest window of zstd that is read, as a power of 2: at least, by default (128 MiB), at most (2 GiB)."""

BROKEN_STREAM = (OSError, EOFError, zlib.error, zstd.ZstdError, pa.ArrowException)
"""Exceptions raised when a damaged or truncated compressed file is read."""

# Longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


_LONGEST_MARK = 4


def open_stream(path: str, handle: BinaryIO, zstd_long: int = ZSTD_LONG) -> BinaryIO:
    """Return the content of an open file, decompressed if its name ends in .gz or .zst.

    Args:
        zstd_long: largest window that is read, as a power of 2; a reader holds so much in memory.
    """
    name = path.lower()
    if name.endswith(".gz"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=handle))
    if name.endswith(".zst"):
        return cast("BinaryIO", _ZstdFile(handle, zstd_long))
    return handle


class _ZstdFile:
    def __init__(self, handle: BinaryIO, zstd_long: int) -> None:
        limit = {int(zstd.DecompressionParameter.window_log_max): zstd_long}
        self._file, self._long = zstd.ZstdFile(handle, options=limit), zstd_long

    def read(self, size: int) -> bytes:
        """Return the next bytes.

        Raises:
            ZstdError: the file is damaged, or its window is too large.
        """
        try:
            return self._file.read(size)
        except zstd.ZstdError as error:
            if "too much memory" not in str(error):
                raise
            remedy = (
                f"give --zstd-long {MAX_ZSTD_LONG}, which takes up to 2 GiB of memory"
                if self._long < MAX_ZSTD_LONG
                else "compress it again with a smaller window"
            )
            raise zstd.ZstdError(
                f"its window is larger than 2^{self._long} bytes (it was made with zstd --long): {remedy}"
            ) from None


def chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield a stream's bytes in pieces of at most CHUNK_BYTES."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def encoding_of(content: bytes) -> str:
    """Return the encoding that a byte order mark names; without one, UTF-8.

    >>> encoding_of("hi".encode("utf-16")), encoding_of(b"hi")
    ('utf-16', 'utf-8')
    """
    return next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")


def _no_character(error: UnicodeError) -> tuple[str, int]:
    """Decode what is no character to half a surrogate pair, which is refused where the text is used."""
    assert isinstance(error, UnicodeDecodeError)
    return "\udfff", error.end


NO_CHARACTER: Final = "penstock.no_character"
"""Error handler of decoders: damage stays inside of its line, and the rest of a file is read."""

codecs.register_error(NO_CHARACTER, _no_character)


def as_utf8(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield text as UTF-8 without its byte order mark; text without a mark is passed on unchecked.

    Codes of UTF-16 and UTF-32 that are no characters, such as half a surrogate pair, become bytes that are
    no UTF-8.

    >>> b"".join(as_utf8(iter(["hi".encode("utf-16")])))
    b'hi'
    """
    first = next(pieces, b"")
    while len(first) < _LONGEST_MARK and (piece := next(pieces, b"")):
        first += piece
    encoding = encoding_of(first)
    if encoding in ("utf-8", "utf-8-sig"):
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder(encoding)(NO_CHARACTER)
    for piece in chain([first], pieces):
        yield decoder.decode(piece).encode(errors="surrogatepass")
    yield decoder.decode(b"", final=True).encode(errors="surrogatepass")


def split_lines(pieces: Iterable[bytes], *, limit: int) -> Iterator[bytes | int]:
    """Yield each line without its newline; for a line above `limit`, only its length.

    Memory stays below the limit plus one piece, however long a line is.

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

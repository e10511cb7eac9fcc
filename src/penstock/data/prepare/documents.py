"""One input file as a stream of documents and rejections, in bounded memory.

A record is what may hold a document: the whole file (text), a line (JSON lines), a row (Parquet).
Records are numbered from 0 in each file, which is the position that a stopped run continues from.
Whatever cannot become a document comes out as a `Rejection` in its place; nothing is dropped.
"""

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from penstock.core.errors import InputError
from penstock.core.units import mib
from penstock.data.prepare.inputs import shown
from penstock.data.prepare.plan import InputFile
from penstock.data.prepare.streams import BROKEN_STREAM, chunks, open_stream, split_lines

Reason = Literal[
    "broken_json", "missing_field", "not_text", "undecodable", "empty", "too_large", "unreadable"
]

# The longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text to store."""

    text: str
    num_bytes: int
    """Its length in UTF-8."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a record holds no document."""

    kind: Reason
    reason: str
    whole_file: bool = False
    """The record is the file, or all of it from here on; otherwise a line or a row."""


@dataclass(frozen=True, slots=True)
class Record:
    """A numbered document or rejection of one file."""

    index: int
    """Number in the file, from 0."""
    content: Document | Rejection
    consumed: int
    """Bytes of the file read so far; for progress only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the readers must know."""

    text_column: str
    """Field or column that holds the document."""
    max_document_bytes: int
    """Largest file, line or value that is kept."""


def read_records(file: InputFile, options: ReadOptions, *, start: int = 0) -> Iterator[Record]:
    """Yield the records of a file from number `start` on.

    Raises:
        InputError: the file is not the one of the plan any more.
    """
    try:
        with open(file.path, "rb") as handle:  # noqa: PTH123  pyarrow reads from the same descriptor
            _check_unchanged(file, handle)
            records = _READERS[file.kind](file, handle, options, start)
            yield from (record for record in records if record.index >= start)
    except OSError as error:
        if error.filename is None:
            raise
        if isinstance(error, FileNotFoundError) and file.mtime_ns:
            raise _changed(file) from None
        yield Record(0, Rejection("unreadable", f"{error.strerror}", whole_file=True), file.bytes)


def document_of(text: str, *, whole_file: bool = False) -> Document | Rejection:
    """Return a text as a document, or why it is none."""
    if not text:
        return Rejection("empty", "no text", whole_file)
    try:
        return Document(text, len(text.encode()))
    except UnicodeEncodeError as error:
        return Rejection("undecodable", f"half a surrogate pair at character {error.start}", whole_file)


def decode_text(content: bytes) -> Document | Rejection:
    """Decode a whole file: UTF-8, or what its byte order mark says.

    >>> decode_text(b"\\xef\\xbb\\xbfhi"), decode_text("hi".encode("utf-16"))
    (Document(text='hi', num_bytes=2), Document(text='hi', num_bytes=2))
    """
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    try:
        return document_of(content.decode(encoding), whole_file=True)
    except UnicodeDecodeError as error:
        return Rejection("undecodable", f"not {encoding} at byte {error.start}", whole_file=True)


def document_of_line(line: bytes, column: str) -> Document | Rejection:
    """Return the document in one JSON line, or why it has none."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Rejection("undecodable", f"not utf-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Rejection("broken_json", f"{error}")
    if not isinstance(value, dict):
        return Rejection("missing_field", f"the line is a JSON {type(value).__name__}, not an object")
    if column not in value:
        return Rejection("missing_field", f"no field {column!r}; the line has: {_some(list(value))}")
    if not isinstance(value[column], str):
        return Rejection("not_text", f"field {column!r} holds {type(value[column]).__name__}, not a string")
    return document_of(value[column])


def _read_text(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    if start:
        return
    limit, parts, size = options.max_document_bytes, [], 0
    content: Document | Rejection
    try:
        for chunk in chunks(open_stream(file.path, handle)):
            size += len(chunk)
            parts.append(chunk)
            if size > limit:
                break
    except BROKEN_STREAM as error:
        yield Record(0, Rejection("unreadable", f"{error}", whole_file=True), file.bytes)
        return
    if size > limit:
        content = Rejection("too_large", f"more than {mib(limit)} of text", whole_file=True)
    else:
        content = decode_text(b"".join(parts))
    yield Record(0, content, file.bytes)


def _read_lines(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    index, limit = -1, options.max_document_bytes
    try:
        stream = open_stream(file.path, handle)  # held, because pyarrow's closes the handle when it goes
        for index, line in enumerate(split_lines(chunks(stream), limit=limit)):
            if index < start:
                continue
            content: Document | Rejection
            if isinstance(line, int):
                content = Rejection("too_large", f"a line of {mib(line)}; the limit is {mib(limit)}")
            else:
                line = line.removeprefix(codecs.BOM_UTF8) if index == 0 else line
                if not line.strip():
                    continue
                content = document_of_line(line, options.text_column)
            yield Record(index, content, handle.tell())
    except BROKEN_STREAM as error:
        reason = f"nothing can be read after line {index + 1}: {error}"
        yield Record(index + 1, Rejection("unreadable", reason, whole_file=True), file.bytes)


def _read_parquet(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    # Imported here because loading pyarrow.parquet takes a tenth of a second.
    from penstock.data.prepare.parquet import read_parquet

    return read_parquet(file, handle, options, start)


_READERS = {"text": _read_text, "jsonl": _read_lines, "parquet": _read_parquet}


def _check_unchanged(file: InputFile, handle: BinaryIO) -> None:
    status = os.fstat(handle.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise _changed(file)


def _changed(file: InputFile) -> InputError:
    fix = "Run the command again with --restart once its inputs hold still."
    return InputError(f"Input {shown(file.path)} changed while the corpus was prepared", fix=fix)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"

"""Input documents: one file as a stream of documents and rejections, in bounded memory.

A record is a possible document: the whole file (text), a line (JSON lines), a row (CSV, Parquet, Arrow, MDS),
or of conversations an element of a JSON list. Records are numbered from 0 in each file; an interrupted run
continues from such a number. A record that cannot become a document yields a `Rejection` in its position. A
record without text has the kind `EMPTY`: it is counted and left out, and is not an error.
"""

import codecs
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final, Literal, cast

import pyarrow as pa

from penstock.core.errors import InputError, UsageError
from penstock.core.packages import Package
from penstock.core.units import mib, plural
from penstock.data.formats.damaged import Malformed
from penstock.data.prepare.byte_streams import (
    BROKEN_STREAM,
    NO_CHARACTER,
    ZSTD_LONG,
    as_utf8,
    chunks,
    encoding_of,
    open_stream,
    split_lines,
)
from penstock.data.prepare.chat_records import FIELDS as CHAT_FIELDS
from penstock.data.prepare.chat_records import without_nulls
from penstock.data.prepare.columnar import (
    TABULAR,
    TableColumns,
    arrow_batches,
    columns_in,
    columns_of,
    is_tsv,
    mds_rows,
)
from penstock.data.prepare.csv_rows import BrokenCsv, csv_rows
from penstock.data.prepare.html import (
    MAX_PAGE_BYTES,
    MAX_PAGE_TAGS,
    HtmlRule,
    check_extractor,
    is_html,
    text_of_html,
)
from penstock.data.prepare.inputs import is_code, kind_of, shown
from penstock.data.prepare.plan import InputFile

pq = Package("pyarrow.parquet", "Parquet files")

Reason = Literal[
    "broken_json",
    "broken_csv",
    "missing_field",
    "not_text",
    "undecodable",
    "empty",
    "too_large",
    "unreadable",
    "bad_conversation",
    "over_long",
    "too_long",
]

EMPTY: Final = "empty"
TOO_LONG: Final = "too_long"
"""Kind of a conversation that is longer than a row, and is left out because the user said so."""
NOT_ERRORS = (EMPTY, TOO_LONG)
"""Kinds of rejections that are counted and listed, but tolerated."""

_MIN_CSV_BOUND = 2**24
"""Characters of a line or value of CSV that are always read, so that a row too large is refused alone."""
_BLANK = re.compile(r"[ \t\n\r]*")
_INTEGER = re.compile(r"u?int\d*")


@dataclass(frozen=True, slots=True)
class Document:
    """Text to store."""

    text: str
    num_bytes: int
    """Length in UTF-8 bytes."""
    is_extracted: bool = False
    """True if it is the main text of an HTML page."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of a conversation, summed for the corpus (see chat_tokens.py)."""


@dataclass(frozen=True, slots=True)
class RawChat:
    """Record of conversations as it was read, not yet written by a template."""

    value: object
    """JSON values."""
    num_bytes: int
    """Length in bytes."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Reason why a record is not a document."""

    kind: Reason
    reason: str
    whole_file: bool = False
    """True if the record is the file, or the rest of it; False: a line or a row."""


@dataclass(frozen=True, slots=True)
class Record:
    """Numbered document or rejection of one file."""

    index: int
    """Number of the record in the file, from 0."""
    content: Document | RawChat | Rejection
    consumed: int
    """Bytes of the file read so far; used only for progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of the readers."""

    text_column: str
    """Field or column that contains the document."""
    max_document_bytes: int
    """Largest file, line or value accepted, in bytes."""
    zstd_long: int = ZSTD_LONG
    """Largest window of zstd that is read, as a power of 2."""
    html: HtmlRule = "extract"
    """HTML pages: their main text, or their mark-up as it is."""
    chat: bool = False
    """True to read conversations: `RawChat` in place of `Document`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Of conversations: names of the records' own fields -> those that are known."""

    @property
    def chat_fields(self) -> tuple[str, ...]:
        """Fields of conversations that are read."""
        return (*CHAT_FIELDS, *(own for own in self.fields if own not in CHAT_FIELDS))


def read_records(file: InputFile, options: ReadOptions, *, start: int = 0) -> Iterator[Record]:
    """Yield the records of a file from number `start` on.

    Raises:
        InputError: the file has changed since the plan was made.
    """
    try:
        with open(file.path, "rb") as handle:  # noqa: PTH123  pyarrow reads from the same descriptor
            _check_unchanged(file, handle)
            records = _READERS[file.kind](file, handle, options, start)
            for record in records:
                if record.index >= start:
                    if options.fields:
                        record = _renamed(record, options.fields)
                    yield _without_markup(record, file.path) if options.html == "extract" else record
    except OSError as error:
        if error.filename is None:
            raise
        if isinstance(error, FileNotFoundError) and file.mtime_ns:
            raise _changed(file) from None
        yield Record(0, Rejection("unreadable", f"{error.strerror}", whole_file=True), file.bytes)


def _renamed(record: Record, fields: Mapping[str, str]) -> Record:
    """Return a record of conversations with the known names of its own fields that are not null."""
    content = record.content
    if not isinstance(content, RawChat) or not isinstance(content.value, Mapping):
        return record
    others = dict(content.value)
    known = {known: others.pop(own) for own, known in fields.items() if others.get(own) is not None}
    return replace(record, content=replace(content, value={**others, **known}))


def _without_markup(record: Record, path: str) -> Record:
    """Return a record with the main text of its page, if it is one."""
    content = record.content
    if not isinstance(content, Document) or is_code(path) or not is_html(content.text, path):
        return record
    check_extractor(shown(path))
    if content.num_bytes > MAX_PAGE_BYTES or content.text.count("<") > MAX_PAGE_TAGS:
        size = f"{mib(content.num_bytes)} and {content.text.count('<'):,} tags"
        found: Document | Rejection = Rejection("too_large", f"an HTML page of {size}")
    else:
        try:
            found = document_of(text_of_html(content.text))
        except ValueError as error:
            found = Rejection("unreadable", f"an HTML page that cannot be parsed: {error}")
    if isinstance(found, Document):
        return replace(record, content=replace(found, is_extracted=True))
    reason = "an HTML page without text" if found.kind == EMPTY else found.reason
    return replace(record, content=Rejection(found.kind, reason, whole_file=kind_of(path) == "text"))


def document_of(text: str, *, whole_file: bool = False) -> Document | Rejection:
    """Return a text as a document, or the reason why it is not one."""
    if not text:
        return Rejection("empty", "no text", whole_file)
    try:
        return Document(text, len(text.encode()))
    except UnicodeEncodeError as error:
        return Rejection("undecodable", f"half a surrogate pair at character {error.start}", whole_file)


def decode_text(content: bytes) -> Document | Rejection:
    """Decode a whole file: UTF-8, or the encoding of its byte order mark.

    >>> decode_text(b"\\xef\\xbb\\xbfhi").text, decode_text("hi".encode("utf-16")).text
    ('hi', 'hi')
    """
    encoding = encoding_of(content)
    try:
        return document_of(content.decode(encoding), whole_file=True)
    except UnicodeDecodeError as error:
        return Rejection("undecodable", f"not {encoding} at byte {error.start}", whole_file=True)


def chat_of_line(line: bytes) -> RawChat | Rejection:
    """Return the record of conversations in one JSON line, or the reason why it has none."""
    value = _json(line)
    if isinstance(value, Rejection):
        return value
    return _chat_of_json(value, len(line), may_be_half=b"\\ud" in line.lower())


def _chat_of_json(value: object, num_bytes: int, *, may_be_half: bool) -> RawChat | Rejection:
    if may_be_half:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Rejection("undecodable", "half a surrogate pair")
    return RawChat(value, num_bytes)


def _chat_of_element(value: object, text: str) -> RawChat | Rejection:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        return Rejection("undecodable", f"no character at character {error.start} of the element")
    return _chat_of_json(value, num_bytes, may_be_half="\\ud" in text.lower())


def _json(line: bytes) -> Any:  # Any: JSON values, or a Rejection
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Rejection("undecodable", _no_utf8(line, error))
    except (ValueError, RecursionError) as error:
        return Rejection("broken_json", f"{error}")


def _no_utf8(line: bytes, error: UnicodeDecodeError) -> str:
    try:
        line.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return f"not utf-8 at byte {error.start}"
    before = len(line[: error.start].decode())
    return f"half a surrogate pair, or another code that is no character, at character {before}"


def document_of_line(line: bytes, column: str) -> Document | Rejection:
    """Return the document in one JSON line, or the reason why it has none."""
    value = _json(line)
    if isinstance(value, Rejection):
        return value
    if not isinstance(value, dict):
        return Rejection("missing_field", f"the line is a JSON {type(value).__name__}, not an object")
    if column not in value:
        return Rejection("missing_field", f"no field {column!r}; the line has: {_some(list(value))}")
    if value[column] is None:
        return Rejection("empty", f"field {column!r} holds null")
    if not isinstance(value[column], str):
        return Rejection("not_text", f"field {column!r} holds {type(value[column]).__name__}, not a string")
    return document_of(value[column])


def _read_text(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    if options.chat:
        yield from _read_json(file, handle, options, start)
        return
    if start:
        return
    limit, parts, size = options.max_document_bytes, [], 0
    content: Document | Rejection
    try:
        for chunk in chunks(open_stream(file.path, handle, options.zstd_long)):
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


def _read_json(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    """Yield the elements of a JSON list; a file that does not begin with one is read as JSON lines."""
    number = 0
    try:
        with open(file.path, "rb") as peeked:  # noqa: PTH123  streams close what they read from
            head = next(as_utf8(chunks(open_stream(file.path, peeked, options.zstd_long))), b"")
        if head.lstrip()[:1] != b"[":
            yield from _read_lines(file, handle, options, start)
            return
        pieces = as_utf8(chunks(open_stream(file.path, handle, options.zstd_long)))
        for number, (value, text) in enumerate(JsonList(pieces, limit=options.max_document_bytes), 1):
            if number > start:
                yield Record(number - 1, _chat_of_element(value, text), handle.tell())
    except (*BROKEN_STREAM, ValueError, RecursionError) as error:
        reason = f"nothing can be read after {plural(number, 'element')} of the list: {error}"
        yield Record(number, Rejection("broken_json", reason, whole_file=True), file.bytes)


class JsonList:
    """Objects of a JSON list, one in memory at a time.

    Args:
        pieces: the bytes of the list, UTF-8.
        limit: characters of an element.

    >>> [value for value, _ in JsonList([b'[{"a": 1}, ', b'{"b": 2}]'], limit=99)]
    [{'a': 1}, {'b': 2}]
    """

    def __init__(self, pieces: Iterable[bytes], *, limit: int) -> None:
        self._pieces, self._limit = iter(pieces), limit
        self._decode = codecs.getincrementaldecoder("utf-8")(NO_CHARACTER).decode
        self._parse = json.JSONDecoder().raw_decode
        self._text, self._at = "", 0

    def __iter__(self) -> Iterator[tuple[object, str]]:
        """Yield each element with its text.

        Raises:
            ValueError: it is no list of objects, or an element is too long; those before have been yielded.
        """
        mark = self._mark("[")
        while mark != "]":
            self._at += 1
            if (mark := self._mark("{]" if mark == "[" else "{")) == "]":
                return
            yield self._element()
            mark = self._mark(",]")

    def _mark(self, known: str) -> str:
        """Return the next character that is not blank, which must be one of those known."""
        while self._holds(1):
            self._at = cast("re.Match[str]", _BLANK.match(self._text, self._at)).end()
            if self._at == len(self._text):
                continue
            if (mark := self._text[self._at]) in known:
                return mark
            raise ValueError(f"{mark!r} in place of {' or '.join(known)}")
        raise ValueError("the list does not end")

    def _element(self) -> tuple[object, str]:
        while True:
            size = len(self._text) - self._at
            try:
                value, past = self._parse(self._text, self._at)
            except json.JSONDecodeError:
                if size > self._limit:
                    raise ValueError(f"an element of more than {mib(self._limit)}") from None
                self._holds(2 * size)  # twice, so that a long element is not parsed at each piece
                if len(self._text) - self._at == size:
                    raise
                continue
            first, self._at = self._at, past
            return value, self._text[first:past]

    def _holds(self, size: int) -> bool:
        """Read on until `size` characters are there; return False if the file ends before."""
        while len(self._text) - self._at < size:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._text, self._at = self._text[self._at :] + self._decode(piece), 0
        return True


def _read_lines(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    index, limit = -1, options.max_document_bytes
    try:
        pieces = as_utf8(chunks(open_stream(file.path, handle, options.zstd_long)))
        for index, line in enumerate(split_lines(pieces, limit=limit)):
            if index < start:
                continue
            content: Document | RawChat | Rejection
            if isinstance(line, int):
                content = Rejection("too_large", f"a line of {mib(line)}; the limit is {mib(limit)}")
            else:
                if not line.strip():
                    continue
                content = chat_of_line(line) if options.chat else document_of_line(line, options.text_column)
            yield Record(index, content, handle.tell())
    except BROKEN_STREAM as error:
        reason = f"nothing can be read after line {index + 1}: {error}"
        yield Record(index + 1, Rejection("unreadable", reason, whole_file=True), file.bytes)


def _read_csv(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    index, limit, column = -1, options.max_document_bytes, options.text_column
    try:
        pieces = as_utf8(chunks(open_stream(file.path, handle, options.zstd_long)))
        rows = csv_rows(pieces, tabs=is_tsv(file.path), limit=max(4 * limit, _MIN_CSV_BOUND))
        names = next(rows)
        columns = TableColumns(kinds=dict.fromkeys(names, "text"), texts=names)
        if not options.chat and (problem := _lacking(columns, column)):
            yield Record(0, problem, file.bytes)
            return
        for index, row in enumerate(rows):
            if index < start or not row:
                continue
            content: Document | RawChat | Rejection
            if len(row) != len(names):
                reason = f"{plural(len(row), 'value')}, and {plural(len(names), 'column')}"
                content = Rejection("broken_csv", reason)
            elif (size := sum(len(text.encode(errors="surrogatepass")) for text in row)) > limit:
                content = Rejection("too_large", f"a row of {mib(size)}; the limit is {mib(limit)}")
            elif options.chat:
                values = {name: text for name, text in zip(names, row, strict=True) if text}
                content = _chat_of_element(values, "".join(row))
            else:
                content = document_of(row[names.index(column)])
            yield Record(index, content, handle.tell())
    except (*BROKEN_STREAM, BrokenCsv) as error:
        reason = f"nothing can be read after row {index + 1}: {error}"
        yield Record(index + 1, Rejection("broken_csv", reason, whole_file=True), file.bytes)


def _check_unchanged(file: InputFile, handle: BinaryIO) -> None:
    status = os.fstat(handle.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise _changed(file)


def _changed(file: InputFile) -> InputError:
    fix = "Run the command again with --restart once its inputs no longer change."
    return InputError(f"Input {shown(file.path)} changed while the corpus was prepared", fix=fix)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


_BATCH_BYTES = 4 * 2**20


def _read_parquet(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    """Yield the rows of one column from row `start` on; earlier row groups are not read."""
    index = 0
    try:
        # Buffered, so that a column chunk is read page by page.
        table = pq.ParquetFile(handle, buffer_size=2**20, pre_buffer=False)
        columns = [options.text_column]
        if options.chat:
            columns = [name for name in options.chat_fields if name in table.schema_arrow.names]
        elif problem := _lacking(columns_in(table.schema_arrow), options.text_column):
            yield Record(0, problem, file.bytes)
            return
        else:  # a text that the file stores once for thousands of rows is in memory once
            table = pq.ParquetFile(
                handle,
                metadata=table.metadata,
                buffer_size=2**20,
                pre_buffer=False,
                read_dictionary=columns,
            )
        total = max(table.metadata.num_rows, 1)
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if index + rows <= start:
                index += rows
                continue
            size = _batch_rows(table.metadata.row_group(group))
            for batch in table.iter_batches(size, row_groups=[group], columns=columns):
                contents = _chats(batch) if options.chat else _contents(batch.column(0), options)
                for content in contents:
                    yield Record(index, content, file.bytes * (index + 1) // total)
                    index += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns are no UTF-8, say
        reason = f"nothing can be read after row {index}: {str(error).splitlines()[0]}"
        yield Record(index, Rejection("unreadable", reason, whole_file=True), file.bytes)


def check_text_column(files: Sequence[InputFile], column: str) -> None:
    """Refuse inputs with columns if none has the column of documents, before anything is written.

    Raises:
        UsageError: none has it; the message lists the columns of the first.
    """
    first: tuple[InputFile, TableColumns] | None = None
    for file in files:
        if file.kind not in TABULAR:
            continue
        try:
            columns = columns_of(file.path, file.kind)
        except (Malformed, OSError):  # it is listed as unreadable when it is read
            return
        if column in columns.texts:
            return
        first = first or (file, columns)
    if first is None:
        return
    file, columns = first
    texts = ", or ".join(f"--text-column {shlex.quote(name)}" for name in columns.texts[:4])
    raise UsageError(
        f"No {TABULAR[file.kind]} input has a text column {column!r}; {shown(file.path)} has: {columns}",
        fix=f"Name the column that contains the documents: {texts}."
        if texts
        else "Prepare files that have a text column.",
    )


def _read_arrow(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    index, columns = 0, columns_of(file.path, "arrow")
    wanted = _chat_columns(columns, options) if options.chat else [options.text_column]
    if not options.chat and (problem := _lacking(columns, options.text_column)):
        yield Record(0, problem, file.bytes)
        return
    for batch in arrow_batches(handle, wanted):
        if index + batch.num_rows <= start:
            index += batch.num_rows
            continue
        for content in _chats(batch) if options.chat else _contents(batch.column(0), options):
            yield Record(index, content, 0)
            index += 1


def _read_mds(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    limit, columns = options.max_document_bytes, columns_of(file.path, "mds")
    wanted = _chat_columns(columns, options) if options.chat else [options.text_column]
    problem = _not_json(columns, wanted) if options.chat else _lacking(columns, options.text_column)
    if problem:
        yield Record(0, problem, file.bytes)
        return
    for index, row in enumerate(mds_rows(file.path, handle, wanted, limit=limit)):
        if index >= start:
            named = {name: (columns.kinds[name], value) for name, value in zip(wanted, row, strict=True)}
            yield Record(index, _chat_of_row(named) if options.chat else _document_of_value(row[0]), 0)


def _chat_columns(columns: TableColumns, options: ReadOptions) -> list[str]:
    return [name for name in options.chat_fields if name in columns.kinds]


def _not_json(columns: TableColumns, wanted: Sequence[str]) -> Rejection | None:
    """Return the rejection of an MDS shard whose conversations are neither texts, JSON nor integers."""
    for name in wanted:
        if (kind := columns.kinds[name]) not in ("str", "json") and not _INTEGER.fullmatch(kind):
            reason = f"column {name!r} holds {kind}, neither text nor JSON"
            return Rejection("not_text", reason, whole_file=True)
    return None


def _chat_of_row(row: Mapping[str, tuple[str, bytes | int]]) -> RawChat | Rejection:
    """Return a sample of MDS as a record: name -> (encoding, bytes, or size of a value above the limit)."""
    values: dict[str, object] = {}
    size = 0
    for name, (kind, value) in row.items():
        if isinstance(value, int):
            return Rejection("too_large", f"{mib(value)} of text")
        size += len(value)
        if _INTEGER.fullmatch(kind):
            values[name] = int.from_bytes(value, "little", signed=not kind.startswith("u"))
            continue
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            return Rejection("undecodable", f"not utf-8 at byte {error.start}")
        if kind == "str":
            values[name] = text
            continue
        found = chat_of_line(value)
        if isinstance(found, Rejection):
            return found
        values[name] = found.value
    return RawChat(without_nulls(values), size)


def _document_of_value(value: bytes | int) -> Document | Rejection:
    if isinstance(value, int):
        return Rejection("too_large", f"{mib(value)} of text")
    try:
        return document_of(value.decode())
    except UnicodeDecodeError as error:
        return Rejection("undecodable", f"not utf-8 at byte {error.start}")


def _read_table(file: InputFile, handle: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    """Yield the rows of an Arrow or MDS file; what is left of a damaged one is one rejection."""
    index = -1
    try:
        for record in (_read_arrow if file.kind == "arrow" else _read_mds)(file, handle, options, start):
            index = record.index
            yield record
    except Malformed as error:
        reason = f"nothing can be read after row {index + 1}: {error}"
        yield Record(index + 1, Rejection("unreadable", reason, whole_file=True), file.bytes)


def _lacking(columns: TableColumns, column: str) -> Rejection | None:
    if column in columns.texts:
        return None
    if column not in columns.kinds:
        have = ", ".join(list(columns.kinds)[:8])
        return Rejection("missing_field", f"no column {column!r}; the file has: {have}", whole_file=True)
    kind = columns.kinds[column]
    is_code = ", which may run code when they are read" if kind == "pkl" else ""
    return Rejection("not_text", f"column {column!r} holds {kind}, not strings{is_code}", whole_file=True)


def _batch_rows(group: Any) -> int:  # Any: pyarrow has no types
    """Return the number of average rows per batch, so that large documents are read one by one."""
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
            yield Rejection("empty", f"column {options.text_column!r} holds null")
            continue
        document = document_of(text)
        if isinstance(document, Document) and document.num_bytes > options.max_document_bytes:
            yield Rejection("too_large", f"{mib(document.num_bytes)} of text")
        else:
            yield document


def _chats(batch: Any) -> Iterator[RawChat | Rejection]:  # Any: pyarrow has no types
    size = batch.nbytes // max(batch.num_rows, 1)
    for index in range(batch.num_rows):
        try:
            [row] = batch.slice(index, 1).to_pylist()
        except UnicodeDecodeError as error:
            yield Rejection("undecodable", f"not utf-8 at byte {error.start}")
            continue
        except ValueError as error:  # two fields of one name, times of nanoseconds
            yield Rejection("unreadable", str(error).partition("\n")[0])
            continue
        yield RawChat(without_nulls(row), size)


_READERS = {
    "text": _read_text,
    "jsonl": _read_lines,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_table,
    "mds": _read_table,
}

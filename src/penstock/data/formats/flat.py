"""Shards whose tokens lie end to end in a flat file; document ends are stored, or found once and kept.

Found ends are kept in a file of the index cache that is named for what it was made from (the first and last
bytes of the shard's files, the options), so one that exists is right, and processes that make it at the same
time make the same. It holds four int64 (a mark, the shard's tokens, its documents, the largest token id or
-1), then the ends.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from penstock.core import config
from penstock.core.arrays import Int64
from penstock.core.errors import CorpusError, UsageError
from penstock.data.formats import StoredShard
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.index_cache import keep, kept
from penstock.storage.base import LocalBlob, Slices, Storage, probe

_CHUNK = 2**22
_MARK = int.from_bytes(b"PSTKENDS", "little")
_HEADER = 4

SEPARATORS = {
    "eos_id": "the token stored after each document; 'none' where each file is one document",
    "bos_id": "the token stored before each document, where none is stored after",
}
"""Options of the formats whose documents are found from their tokens."""

Chunks = Iterator[tuple[Int64, int]]
"""Some document ends in rising order, and the largest token id met, or -1 where tokens were not read."""


@dataclass(frozen=True, slots=True)
class Separator:
    """Token that separates documents in a flat file."""

    token: int | None
    """None: the file is one document."""
    before: bool
    """The token begins a document; else it ends one."""


def separated_shard(storage: Storage, name: str, tokens: Slices, cut: Separator, *, how: str) -> StoredShard:
    """Return the shard of a file whose documents are found from its tokens.

    Args:
        how: how its bytes become tokens; a word of it that changes makes what was kept useless.
    """
    ends, largest_id = kept_ends(
        storage,
        (name,),
        how=f"{how} {cut.token} {cut.before}",
        num_tokens=len(tokens),
        find=lambda: document_chunks(tokens, cut),
    )
    recheck = partial(_recheck, tokens, cut, ends.between)
    return StoredShard(tokens, len(ends), ends.between, largest_id, recheck)


def separator(options: Mapping[str, str], *, name: str) -> Separator:
    """Return the separator that a user gives.

    Raises:
        UsageError: there is none, or it is no token id.
    """
    given = [option for option in SEPARATORS if option in options]
    if len(given) != 1:
        raise UsageError(
            f"{name} stores no document boundaries" if not given else "Give eos_id or bos_id, not both",
            fix="Add ',eos_id=N' with the token stored after each document, ',bos_id=N' with the one stored "
            "before each, or ',eos_id=none' to take each file as one document.",
        )
    text = options[given[0]]
    if text == "none" and given == ["eos_id"]:
        return Separator(None, before=False)
    if not (text.isascii() and text.isdecimal() and int(text) < 2**32):
        raise UsageError(f"{given[0]} must be a token id", got=text)
    return Separator(int(text), before=given == ["bos_id"])


def document_chunks(tokens: Slices, cut: Separator) -> Chunks:
    """Yield the ends of documents and the largest id, 4 million tokens at a time.

    The end of a last document that has none is left out, but for `eos_id=none`.
    """
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        places: Int64 = np.zeros(0, np.int64)
        if cut.token is not None and cut.token <= np.iinfo(chunk.dtype).max:
            places = np.flatnonzero(chunk == chunk.dtype.type(cut.token)) + start
            places = places[places > 0] if cut.before else places + 1
        yield places, int(chunk.max())


def _recheck(tokens: Slices, cut: Separator, between: Callable[[int, int], Int64]) -> Iterator[str]:
    """Find the documents again, and say where they are not as they were found before."""
    start = 0
    for ends, _ in document_chunks(tokens, cut):
        if len(ends) and not np.array_equal(between(start, int(ends[-1])), ends):
            yield "its documents are not those found when it was indexed"
            return
        start = int(ends[-1]) if len(ends) else start
    if start < len(tokens) and len(between(start, len(tokens))) != 1:
        yield "its documents are not those found when it was indexed"


def kept_ends(
    storage: Storage, files: tuple[str, ...], *, how: str, num_tokens: int, find: Callable[[], Chunks]
) -> tuple[DocumentEnds, int]:
    """Return the document ends of a shard, and its largest token id, -1 if that is not known.

    They are as they were found before, or found now and kept.

    Args:
        files: that they follow from; the first names the shard.
        how: what else they follow from.
        find: finds them, in chunks.
    """
    key = config.fingerprint([probe(storage, files[0], files[1:]), how])
    name = f"{files[0].replace('/', '+')[-80:]}-{key}.ends"
    path = kept(storage, name)
    found = _read(path, num_tokens) if path else None
    if found is None:
        path = keep(storage, name, lambda file: _write(file, num_tokens, find()))
        found = _read(path, num_tokens)
    if found is None:
        raise CorpusError(
            f"{path} was altered while it was read", fix="Delete it; it is made again when it is needed."
        )
    return found


def _write(file: BinaryIO, num_tokens: int, chunks: Chunks) -> None:
    file.write(bytes(8 * _HEADER))
    count = last = 0
    largest = -1
    for ends, highest in chunks:
        file.write(ends.astype("<i8", copy=False).tobytes())
        largest = max(largest, highest)
        if len(ends):
            count, last = count + len(ends), int(ends[-1])
    if last < num_tokens:  # the last document has no end of its own
        file.write(np.array([num_tokens], "<i8").tobytes())
        count += 1
    file.seek(0)
    file.write(np.array([_MARK, num_tokens, count, largest], "<i8").tobytes())


def _read(path: Path, num_tokens: int) -> tuple[DocumentEnds, int] | None:
    """Return the content of a file; None where it is damaged."""
    try:
        blob = LocalBlob(path)
        mark, tokens, count, largest = np.frombuffer(blob.read(0, 8 * _HEADER), "<i8").tolist()
        if (mark, tokens) != (_MARK, num_tokens) or blob.size != 8 * (_HEADER + count):
            return None
        ends = blob.array("<i8", offset=8 * _HEADER, count=count)
        return DocumentEnds(ends, num_tokens=num_tokens, name=str(path)), largest
    except CorpusError:
        return None

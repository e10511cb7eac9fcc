"""Document ends that a format does not store: found once, kept in a file beside the data or in the cache.

The file is named for what it was made from (the ends of the shard's files, the options), so one that
exists is right, and processes that make it at the same time make the same. It holds four int64 (a mark, the
shard's tokens, its documents, the largest token id or -1), then the ends.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from penstock.core import config
from penstock.core.errors import CorpusError
from penstock.data.formats.index import DocumentEnds
from penstock.data.index_folder import keep, kept
from penstock.data.probe import probe
from penstock.data.storage import LocalBlob, Storage
from penstock.data.types import Int64

_MARK = int.from_bytes(b"PSTKENDS", "little")
_HEADER = 4

Chunks = Iterator[tuple[Int64, int]]
"""Some document ends in rising order, and the largest token id met, or -1 where tokens were not read."""


class Found(NamedTuple):
    """The documents of a shard."""

    ends: DocumentEnds
    largest_id: int
    """-1 where it is not known."""


def documents_of(
    storage: Storage, files: tuple[str, ...], *, how: str, num_tokens: int, find: Callable[[], Chunks]
) -> Found:
    """Return the document ends of a shard: as they were found before, or found now and kept.

    Args:
        files: of the shard; the first names it.
        how: what else the result depends on.
        find: finds them, in chunks.
    """
    key = config.fingerprint([probe(storage, files[0], files[1:]), how])
    name = f"{files[0].replace('/', '+')[-80:]}-{key}.ends"
    path = kept(storage, name)
    found = _opened(path, num_tokens) if path else None
    if found is None:
        path = keep(storage, name, lambda file: _write(file, num_tokens, find()))
        found = _opened(path, num_tokens)
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


def _opened(path: Path, num_tokens: int) -> Found | None:
    """Return the content of a file; None where it is damaged."""
    try:
        blob = LocalBlob(path)
        mark, tokens, count, largest = np.frombuffer(blob.read(0, 8 * _HEADER), "<i8").tolist()
        if (mark, tokens) != (_MARK, num_tokens) or blob.size != 8 * (_HEADER + count):
            return None
        ends = blob.array("<i8", offset=8 * _HEADER, count=count)
        return Found(DocumentEnds(ends, num_tokens=num_tokens, name=str(path)), largest)
    except CorpusError:
        return None

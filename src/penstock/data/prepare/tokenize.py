"""Tokenization: documents to token ids, in order, on all cores, in bounded memory.

While one batch is encoded (in native threads that leave Python free) the next one is read. A document above
PIECE_CHARS is encoded in pieces, because the library needs some 25 times a text's size in memory and uses one
core per text. Pieces end, if possible, where a single newline or space is between two visible characters: the
usual splitting rules (GPT-2's and its successors) always split there, so the ids are those of the whole
document.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Tokens
from penstock.data.prepare.documents import Document, RawChat, Record, Rejection

PIECE_CHARS = 2**18
_BATCH_BYTES = 2 * 2**20
_BATCH_RECORDS = 8192

_GOOD_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")

RecordPosition = tuple[int, Record]
"""Record and the number of its input file."""
Encode = Callable[[list[str]], list[npt.NDArray[np.uint32]]]


def tokenised(
    places: Iterable[RecordPosition],
    encode: Encode,
    *,
    dtype: type[np.uint16 | np.uint32],
    eos_id: int | None,
) -> Iterator[list[tuple[RecordPosition, Tokens | None]]]:
    """Yield batches of records with their tokens (None for a rejection), in the given order.

    Args:
        encode: texts -> ids; called from one other thread, for one batch at a time.
        eos_id: appended to every document; None: nothing is appended.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
    ahead: Future[list[Tokens]] | None = None
    before: list[RecordPosition] = []
    try:
        for batch in batches(places, most_bytes=_BATCH_BYTES, most_records=_BATCH_RECORDS):
            texts = [r.content.text for _, r in batch if isinstance(r.content, Document)]
            following = pool.submit(_encode_all, texts, encode, dtype, eos_id)
            if ahead is not None:
                yield _joined(before, ahead.result())
            ahead, before = following, batch
        if ahead is not None:
            yield _joined(before, ahead.result())
    finally:  # after Ctrl-C, batches that have not begun are dropped
        pool.shutdown(cancel_futures=True)


def pieces_of(text: str, *, size: int) -> Iterator[str]:
    """Cut a text into pieces of at most `size` characters, at line ends where possible.

    >>> list(pieces_of("one\\ntwo\\nthree", size=9))
    ['one\\ntwo\\n', 'three']
    """
    start = 0
    while len(text) - start > size:
        stop = _cut(text, start, start + size)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _cut(text: str, start: int, limit: int) -> int:
    """Return the last suitable cut in (start, limit], searching back at most 4,096 characters."""
    low = max(start + 1, limit - 4096)
    # Two characters after the cut must be seen, so the window reaches beyond the limit.
    window = text[low - 1 : limit + 2]
    cuts = [found.start() for found in _GOOD_CUT.finditer(window)]
    cuts = [low - 1 + cut for cut in cuts if start < low - 1 + cut <= limit]
    if cuts:
        return cuts[-1]
    newline = text.rfind("\n", low, limit)
    return newline + 1 if newline > 0 else limit


def batches(
    places: Iterable[RecordPosition], *, most_bytes: int, most_records: int
) -> Iterator[list[RecordPosition]]:
    """Yield records in lists of about this many bytes or records."""
    batch: list[RecordPosition] = []
    size = 0
    for place in places:
        batch.append(place)
        content = place[1].content
        size += content.num_bytes if isinstance(content, Document | RawChat) else 0
        if size >= most_bytes or len(batch) >= most_records:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_all(
    texts: list[str], encode: Encode, dtype: type[np.uint16 | np.uint32], eos_id: int | None
) -> list[Tokens]:
    """Return the tokens of each text, as slices of one array per batch.

    Only one group of pieces at a time is held in the library's representation.
    """
    pieces: list[npt.NDArray[np.uint32]] = []
    lengths = np.full(len(texts), int(eos_id is not None), np.int64)
    owners: list[int] = []
    for group in _groups(texts):
        pieces += encode([piece for _, piece in group])
        owners += [owner for owner, _ in group]
    np.add.at(lengths, owners, [len(ids) for ids in pieces])
    ends = np.cumsum(lengths).tolist()
    tokens = np.empty(ends[-1] if ends else 0, dtype)
    if eos_id is not None:
        tokens[np.array(ends, np.int64) - 1] = eos_id
    at, last = 0, 0
    for owner, ids in zip(owners, pieces, strict=True):
        if owner != last:
            at, last = ends[owner - 1], owner
        tokens[at : at + len(ids)] = ids
        at += len(ids)
    return cast("list[Tokens]", [tokens[a:b] for a, b in pairwise([0, *ends])])


def _groups(texts: list[str]) -> Iterator[list[tuple[int, str]]]:
    group: list[tuple[int, str]] = []
    size = 0
    for owner, text in enumerate(texts):
        for piece in pieces_of(text, size=PIECE_CHARS):
            group.append((owner, piece))
            size += len(piece)
            if size >= _BATCH_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def _joined(batch: list[RecordPosition], tokens: list[Tokens]) -> list[tuple[RecordPosition, Tokens | None]]:
    remaining = iter(tokens)
    return [(p, None if isinstance(p[1].content, Rejection) else next(remaining)) for p in batch]

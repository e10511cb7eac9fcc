"""Tokenization: documents to token ids, in order, on all cores, in bounded memory.

While one batch is encoded (in native threads that leave Python free) the next one is read. The ids are those
of the whole text. The library uses one core per text, and up to 300 times a text's size in memory, so a
document above PIECE_CHARS is encoded in pieces if the tokenizer has safe cuts (see text/safe_cuts.py). What
cannot be cut is encoded as a whole up to WHOLE_BYTES, and rejected above.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Tokens
from penstock.core.units import mib
from penstock.data.prepare.documents import Document, RawChat, Record, Rejection
from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")
R = TypeVar("R")

PIECE_CHARS = 2**18
WHOLE_BYTES = 16 * 2**20
"""Largest text, in bytes, that is encoded as a whole. Measured with tokenizers 0.23: 1.4 to 2 GiB with the
tokenizers of GPT-2, Llama 2, BERT and T5, and 4.7 GiB if each character is a token."""
_BATCH_BYTES = 2 * 2**20
_BATCH_RECORDS = 8192
_TOLD_BYTES = 4 * 2**20

RecordPosition = tuple[int, Record]
"""Record and the number of its input file."""
Pieces = list[tuple[str, str]]
"""Pieces of a text: for each the character before it, "" for the first, and its text."""
CutRecord = tuple[RecordPosition, Pieces | None]
"""Record and the pieces of its text; None for a rejection."""
OnWhole = Callable[[RecordPosition, int], None]
"""Callback with a record and the bytes of a long text in it that has no safe cut."""
OnWait = Callable[[], None]
"""Callback while nothing else can be reported."""
_WAIT_S = 1.0


def tokenised(
    places: Iterable[RecordPosition],
    tokenizer: Tokenizer,
    *,
    dtype: type[np.uint16 | np.uint32],
    eos_id: int | None,
    on_whole: OnWhole = lambda _place, _bytes: None,
    on_wait: OnWait = lambda: None,
) -> Iterator[list[tuple[RecordPosition, Tokens | None]]]:
    """Yield batches of records with their tokens (None for a rejection), in the given order.

    A document that has no safe cut and is longer than WHOLE_BYTES is rejected.

    Args:
        tokenizer: used by one other thread, for one batch at a time.
        eos_id: appended to every document; None: nothing is appended.
        on_whole: called before a text of more than 4 MiB is encoded as a whole.
        on_wait: called each second while a batch is encoded.
    """
    records = grouped(places, size_of_record, most_size=_BATCH_BYTES, most=_BATCH_RECORDS)
    cut = ([_cut(place, tokenizer, on_whole) for place in batch] for batch in records)

    def encoded(batch: Sequence[CutRecord]) -> list[tuple[RecordPosition, Tokens | None]]:
        texts = [pieces for _, pieces in batch if pieces is not None]
        tokens = iter(_encode_all(texts, tokenizer, dtype, eos_id))
        return [(place, None if pieces is None else next(tokens)) for place, pieces in batch]

    yield from one_ahead(cut, encoded, on_wait=on_wait, thread="tokenise")


def one_ahead(items: Iterable[T], compute: Callable[[T], R], *, on_wait: OnWait, thread: str) -> Iterator[R]:
    """Yield what `compute` returns for each item, in order; a thread computes while the next item is read.

    Args:
        on_wait: called each second while nothing else can be done.
        thread: the name of the thread.
    """
    pool = ThreadPoolExecutor(1, thread)
    ahead: Future[R] | None = None
    try:
        for item in items:
            following = pool.submit(compute, item)
            if ahead is not None:
                yield _awaited(ahead, on_wait)
            ahead = following
        if ahead is not None:
            yield _awaited(ahead, on_wait)
    finally:  # after Ctrl-C, what has not begun is dropped
        pool.shutdown(cancel_futures=True)


def _awaited(future: Future[T], on_wait: OnWait) -> T:
    while not wait([future], _WAIT_S).done:
        on_wait()
    return future.result()


def pieces_of(text: str, tokenizer: Tokenizer, *, size: int) -> Pieces:
    """Cut a text at safe cuts into pieces of at least `size` characters, but for the last."""
    cuts = tokenizer.safe_cuts if len(text) > size else None
    edges = [0, *(cuts.places(text, size=size) if cuts else ()), len(text)]
    return [(text[start - 1 : start] if start else "", text[start:stop]) for start, stop in pairwise(edges)]


def _cut(place: RecordPosition, tokenizer: Tokenizer, on_whole: OnWhole) -> CutRecord:
    """Cut the text of a record, which becomes a rejection if it is too large."""
    number, record = place
    if not isinstance(record.content, Document):
        return place, None
    pieces = pieces_of(record.content.text, tokenizer, size=PIECE_CHARS)
    largest = max(len(piece) if piece.isascii() else len(piece.encode()) for _, piece in pieces)
    if largest > WHOLE_BYTES:
        reason = (
            f"{mib(largest)} of text that this tokenizer's rules allow no cut in; the limit is "
            f"{mib(WHOLE_BYTES)}: split the document"
        )
        return (number, replace(record, content=Rejection("too_large", reason))), None
    if largest > _TOLD_BYTES:
        on_whole(place, largest)
    return place, pieces


def grouped(
    items: Iterable[T], size_of: Callable[[T], int], *, most_size: int, most: int | None = None
) -> Iterator[list[T]]:
    """Yield items in lists, each closed by the item that brings it to this size or number."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= most_size or len(group) == most:
            yield group
            group, size = [], 0
    if group:
        yield group


def size_of_record(place: RecordPosition) -> int:
    """Return the bytes of a record's content; 0 of a rejection."""
    content = place[1].content
    return content.num_bytes if isinstance(content, Document | RawChat) else 0


def _encode_all(
    texts: list[Pieces], tokenizer: Tokenizer, dtype: type[np.uint16 | np.uint32], eos_id: int | None
) -> list[Tokens]:
    """Return the tokens of each text, as slices of one array per batch.

    Only one group of pieces at a time is held in the library's representation.
    """
    pieces: list[npt.NDArray[np.uint32]] = []
    lengths = np.full(len(texts), int(eos_id is not None), np.int64)
    owners: list[int] = []
    owned = ((owner, piece) for owner, text in enumerate(texts) for piece in text)
    for group in grouped(owned, lambda one: len(one[1][1]), most_size=_BATCH_BYTES):
        pieces += _encode_pieces([piece for _, piece in group], tokenizer)
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


def _encode_pieces(pieces: Pieces, tokenizer: Tokenizer) -> list[npt.NDArray[np.uint32]]:
    """Return the ids of each piece, without those of the character before it."""
    before = sorted({letter for letter, _ in pieces if letter})
    encoded = tokenizer.encode_batch([*before, *(letter + piece for letter, piece in pieces)])
    num_ids = {"": 0} | {letter: len(ids) for letter, ids in zip(before, encoded, strict=False)}
    return [ids[num_ids[letter] :] for (letter, _), ids in zip(pieces, encoded[len(before) :], strict=True)]

"""Tokenization: documents to token ids, in order, on all cores, in bounded memory.

While one batch is encoded (in native threads that leave Python free) the next one is read. The ids are those
of the whole text. The library uses one core per text, and up to 300 times a text's size in memory, so a
document above PIECE_CHARS is encoded in pieces if the tokenizer has safe cuts (see text/safe_cuts.py). What
cannot be cut is encoded as a whole up to WHOLE_BYTES, and rejected above.
"""

from collections.abc import Callable, Iterable, Iterator
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
    pool = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
    ahead: Future[list[Tokens]] | None = None
    before: list[RecordPosition] = []
    try:
        for records in batches(places, most_bytes=_BATCH_BYTES, most_records=_BATCH_RECORDS):
            cut = [_cut(place, tokenizer, on_whole) for place in records]
            texts = [pieces for _, pieces in cut if pieces is not None]
            following = pool.submit(_encode_all, texts, tokenizer, dtype, eos_id)
            if ahead is not None:
                yield _joined(before, awaited(ahead, on_wait))
            ahead, before = following, [place for place, _ in cut]
        if ahead is not None:
            yield _joined(before, awaited(ahead, on_wait))
    finally:  # after Ctrl-C, batches that have not begun are dropped
        pool.shutdown(cancel_futures=True)


def awaited(future: Future[T], on_wait: OnWait) -> T:
    """Return the result of a future; call `on_wait` each second until there is one."""
    while not wait([future], _WAIT_S).done:
        on_wait()
    return future.result()


def pieces_of(text: str, tokenizer: Tokenizer, *, size: int) -> Pieces:
    """Cut a text at safe cuts into pieces of at least `size` characters, but for the last."""
    cuts = tokenizer.safe_cuts if len(text) > size else None
    edges = [0, *(cuts.places(text, size=size) if cuts else ()), len(text)]
    return [(text[start - 1 : start] if start else "", text[start:stop]) for start, stop in pairwise(edges)]


def _cut(
    place: RecordPosition, tokenizer: Tokenizer, on_whole: OnWhole
) -> tuple[RecordPosition, Pieces | None]:
    """Return a record and the pieces of its text; None if it is or becomes a rejection."""
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
    texts: list[Pieces], tokenizer: Tokenizer, dtype: type[np.uint16 | np.uint32], eos_id: int | None
) -> list[Tokens]:
    """Return the tokens of each text, as slices of one array per batch.

    Only one group of pieces at a time is held in the library's representation.
    """
    pieces: list[npt.NDArray[np.uint32]] = []
    lengths = np.full(len(texts), int(eos_id is not None), np.int64)
    owners: list[int] = []
    for group in _groups(texts):
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


def _groups(texts: list[Pieces]) -> Iterator[list[tuple[int, tuple[str, str]]]]:
    group: list[tuple[int, tuple[str, str]]] = []
    size = 0
    for owner, pieces in enumerate(texts):
        for piece in pieces:
            group.append((owner, piece))
            size += len(piece[1])
            if size >= _BATCH_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def _joined(batch: list[RecordPosition], tokens: list[Tokens]) -> list[tuple[RecordPosition, Tokens | None]]:
    remaining = iter(tokens)
    return [(p, None if isinstance(p[1].content, Rejection) else next(remaining)) for p in batch]

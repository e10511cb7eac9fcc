"""Flat files of tokens, whose documents are found from the token that ends or begins each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import UsageError
from penstock.data.formats.sidecar import Chunks, Found, documents_of
from penstock.data.storage import Slices, Storage
from penstock.data.types import Int64

_CHUNK = 2**22

SEPARATORS = {
    "eos_id": "the token stored after each document; 'none' where each file is one document",
    "bos_id": "the token stored before each document, where none is stored after",
}
"""Options of the formats whose documents are found from their tokens."""


@dataclass(frozen=True, slots=True)
class Separator:
    """How documents are told apart in a run of tokens."""

    token: int | None
    """None: they are not, all is one document."""
    before: bool
    """The token begins a document; else it ends one."""


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


class FlatShard:
    """Tokens of one flat file; its documents come from a sidecar."""

    def __init__(self, tokens: Slices, found: Found, cut: Separator | None) -> None:
        self.tokens = tokens
        self.num_tokens = len(tokens)
        self.num_documents = len(found.ends)
        self.largest_id = found.largest_id
        self.document_ends = found.ends.between
        self._cut = cut

    def recheck(self) -> Iterator[str]:
        """Find the documents again, and say where they are not as they were found before."""
        if self._cut is None:
            return
        start = 0
        for ends, _ in document_chunks(self.tokens, self._cut):
            if len(ends) and not np.array_equal(self.document_ends(start, int(ends[-1])), ends):
                yield "its documents are not those found when it was indexed"
                return
            start = int(ends[-1]) if len(ends) else start
        if start < self.num_tokens and len(self.document_ends(start, self.num_tokens)) != 1:
            yield "its documents are not those found when it was indexed"


def flat_shard(
    storage: Storage, files: tuple[str, ...], *, tokens: Slices, cut: Separator, how: str
) -> FlatShard:
    """Return the shard of a flat file, its documents found from its tokens.

    Args:
        files: of the shard; the first names it.
        how: how its bytes become tokens.
    """
    found = documents_of(
        storage,
        files,
        how=f"{how} {cut.token} {cut.before}",
        num_tokens=len(tokens),
        find=lambda: document_chunks(tokens, cut),
    )
    return FlatShard(tokens, found, cut)


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

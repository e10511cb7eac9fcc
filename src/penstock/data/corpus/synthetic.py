"""Synthetic corpora of any size: tokens and documents are computed from their positions.

For tests and for scaling runs. Document ends are computed too: each cell of 64 mean lengths is cut at 63
keyed positions, so lengths are distributed as those of documents with independent random ends. A token is a
hash of its position: a table of scrambled numbers, one page long, scrambled again with a key of the page; a
slice costs four passes over memory that stays in cache.
"""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Int64, Tokens
from penstock.core.errors import PenstockError, UsageError
from penstock.core.rng import key_of, mix64
from penstock.core.units import parse_count
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.manifest import Manifest, ShardEntry
from penstock.data.corpus.spec import SYNTHETIC, Spec
from penstock.data.formats import Format, Options, StoredShard, TokenShard
from penstock.storage.base import Storage

OPTIONS = {
    "tokens": "number of tokens, such as 5000, 10M or 1e14",
    "mean_document": "mean tokens of a document; default 900",
    "seed": "seed of tokens and documents; default 0",
    "shards": "number of shards; default one per 10^9 tokens, at most 100,000",
    "vocab_size": "token ids are below it; default 65,536",
}

_CELL_DOCUMENTS = 64
_PAGE_BITS = 16
_PAGE = 2**_PAGE_BITS
_MASK = 2**64 - 1
_ODD = np.uint32(0x9E3779B1)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_MAX_SHARDS = 100_000
_MAX_TOKENS = 2**60


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Options of a synthetic corpus, validated."""

    tokens: int
    mean_document: int
    seed: int
    shards: int
    vocab_size: int

    @property
    def cell(self) -> int:
        """Tokens of a cell of 64 documents."""
        return _CELL_DOCUMENTS * self.mean_document

    @property
    def starts(self) -> Int64:
        """First token of each shard, then the number of tokens: [shards + 1] int64, at cell boundaries."""
        whole, more = divmod(-(-self.tokens // self.cell), self.shards)
        numbers = np.arange(self.shards + 1, dtype=np.int64)
        return np.minimum((numbers * whole + np.minimum(numbers, more)) * self.cell, self.tokens)

    def start(self, shard: int) -> int:
        """Return the first token of a shard."""
        whole, more = divmod(-(-self.tokens // self.cell), self.shards)
        return min((shard * whole + min(shard, more)) * self.cell, self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents of the whole corpus."""
        last = self.start(self.shards - 1)
        shard = SyntheticShard(self, last, self.tokens)
        return last // self.cell * _CELL_DOCUMENTS + shard.num_documents

    def as_options(self) -> dict[str, str]:
        """Return the options that define this corpus."""
        return {name: str(getattr(self, name)) for name in OPTIONS}


def parse(options: Options) -> Synthetic:
    """Read the options of a synthetic corpus.

    Raises:
        UsageError: one is missing or out of range.

    >>> parse({"tokens": "1e14"}).shards
    100000
    """
    if "tokens" not in options:
        raise UsageError("A synthetic corpus needs its size", fix="Add tokens: 'synthetic:tokens=1e9'.")
    tokens = _number(options, "tokens", 0, least=1, most=_MAX_TOKENS)
    mean = _number(options, "mean_document", 900, least=1, most=2**40)
    cells = -(-tokens // (mean * _CELL_DOCUMENTS))
    shards = min(max(1, tokens // 10**9), _MAX_SHARDS, cells)
    return Synthetic(
        tokens=tokens,
        mean_document=mean,
        seed=_number(options, "seed", 0, least=0, most=2**63),
        shards=_number(options, "shards", shards, least=1, most=min(_MAX_SHARDS, cells)),
        vocab_size=_number(options, "vocab_size", 2**16, least=1, most=2**32),
    )


def _number(options: Options, name: str, default: int, *, least: int, most: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    try:
        exact = Decimal(text) if "e" in text.lower() else Decimal(parse_count(text))
        value = int(exact) if exact == exact.to_integral_value() else -1
    except (InvalidOperation, ValueError, OverflowError, PenstockError):
        value = -1
    if not least <= value <= most:
        raise UsageError(f"{name} of a synthetic corpus must be from {least:,} to {most:,}", got=text)
    return value


class SyntheticShard:
    """Shard of a synthetic corpus: tokens [start, stop); `start` is a cell boundary."""

    def __init__(self, corpus: Synthetic, start: int, stop: int) -> None:
        self.num_tokens = stop - start
        self.tokens = _Tokens(corpus, start, stop)
        self._cell, self._first_cell = corpus.cell, start // corpus.cell
        self._key = np.uint64(_key(corpus.seed, "synthetic documents"))

    @cached_property
    def num_documents(self) -> int:
        """Documents of the shard, empty ones included."""
        whole, rest = divmod(self.num_tokens, self._cell)
        cut_short = len(self.document_ends(whole * self._cell, self.num_tokens)) if rest else 0
        return whole * _CELL_DOCUMENTS + cut_short

    def document_ends(self, start: int, stop: int) -> Int64:
        """Return the ends e of documents with start < e <= stop; repeated values are empty documents."""
        first, past = start // self._cell, -(-stop // self._cell)
        ends = self._cell_ends(first, past)
        if past * self._cell > self.num_tokens:
            ends = ends[ends < self.num_tokens]
            ends = np.append(ends, self.num_tokens)
        return ends[ends.searchsorted(start, "right") : ends.searchsorted(stop, "right")]

    def _cell_ends(self, first: int, past: int) -> Int64:
        """Return the document ends in cells [first, past) of the shard, flat, 64 per cell.

        An end is a hash of the document's number, scaled to the cell by a multiplication (its upper bits).
        """
        before = self._first_cell * _CELL_DOCUMENTS
        at = np.arange(before + first * _CELL_DOCUMENTS, before + past * _CELL_DOCUMENTS, dtype=np.uint64)
        at ^= self._key
        at *= _MULTIPLIER
        at ^= at >> np.uint64(32)
        at *= _MULTIPLIER
        bits = 64 - self._cell.bit_length()
        at >>= np.uint64(64 - bits)
        at *= np.uint64(self._cell)
        at >>= np.uint64(bits)
        ends = at.view(np.int64).reshape(-1, _CELL_DOCUMENTS)
        ends[:, -1] = self._cell - 1
        ends.sort(axis=1)
        ends += np.arange(first * self._cell + 1, past * self._cell + 1, self._cell)[:, None]
        flat: Int64 = ends.reshape(-1)
        return flat


class _Tokens:
    """Token array [start, stop) whose slices are computed."""

    def __init__(self, corpus: Synthetic, start: int, stop: int) -> None:
        self._start, self._count = start, stop - start
        self._vocab_size = corpus.vocab_size
        self._key = _key(corpus.seed, "synthetic tokens")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice, /) -> Tokens:
        first, past, _ = part.indices(self._count)
        start, stop = self._start + first, self._start + max(first, past)
        if start >> _PAGE_BITS == max(start, stop - 1) >> _PAGE_BITS:
            return self._of_page(start, stop)
        edges = [start, *range((start // _PAGE + 1) * _PAGE, stop, _PAGE), stop]
        parts: list[Tokens] = [self._of_page(low, high) for low, high in pairwise(edges)]
        return np.concatenate(parts, out=np.empty(stop - start, parts[0].dtype))

    def _of_page(self, start: int, stop: int) -> Tokens:
        page, first = start >> _PAGE_BITS, start & (_PAGE - 1)
        mixed = _table()[first : first + stop - start] ^ _page_key(self._key, page)
        mixed *= _ODD
        if self._vocab_size > 2**16:
            wide = mixed.astype(np.uint64) * np.uint64(self._vocab_size)
            return (wide >> np.uint64(32)).astype(np.uint32)
        mixed >>= np.uint32(16)
        if self._vocab_size < 2**16:
            mixed *= np.uint32(self._vocab_size)
            mixed >>= np.uint32(16)
        return mixed.astype(np.uint16)


_key = lru_cache(maxsize=16)(key_of)  # the same for all shards of a corpus


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    return (mix64(np.arange(_PAGE, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32)


def _page_key(key: int, page: int) -> np.uint32:
    """Return a 32-bit key of a page: one SplitMix64 step on Python integers, faster for a single value."""
    z = (key + page * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return np.uint32(z >> 32)


def open_shard(storage: Storage, name: str, options: Options) -> StoredShard:  # noqa: ARG001
    """Return shard number `name` of the corpus defined by the options; nothing is read."""
    corpus, index = parse(options), int(name)
    shard = SyntheticShard(corpus, corpus.start(index), corpus.start(index + 1))
    return StoredShard(shard.tokens, shard.num_documents, shard.document_ends)


_LISTED_SHARDS = 1024
"""Shards up to which the manifest of a synthetic corpus lists them."""


def open_synthetic(spec: Spec) -> Corpus:
    """Return the corpus of a spec such as `synthetic:tokens=1e9`.

    Raises:
        UsageError: an option is missing or out of range.
    """
    made = parse(spec.options)
    starts, options = made.starts, made.as_options()

    def opened(index: int) -> TokenShard:
        return SyntheticShard(made, made.start(index), made.start(index + 1))

    entries: list[ShardEntry] = []
    if made.shards <= _LISTED_SHARDS:
        for index, tokens in enumerate(np.diff(starts).tolist()):
            documents = opened(index).num_documents
            entries.append(ShardEntry(name=str(index), tokens=tokens, documents=documents, bytes=0))
    manifest = Manifest(
        format=SYNTHETIC,
        dtype="uint16" if made.vocab_size <= 2**16 else "uint32",
        vocab_size=made.vocab_size,
        options=options,
        shards=tuple(entries),
    )
    corpus = Corpus(f"{SYNTHETIC}:", manifest, starts=starts, open_shard=opened)
    corpus.num_documents = made.num_documents  # the manifest cannot count shards that it does not list
    return corpus


FORMAT = Format(open_shard=open_shard, options=OPTIONS)

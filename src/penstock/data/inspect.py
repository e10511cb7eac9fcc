"""Describe a corpus: sizes, document lengths, and the text of a few documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.data.corpus import Corpus
from penstock.data.formats import Tokens, TokenShard
from penstock.data.manifest import Manifest
from penstock.data.opening import open_corpus
from penstock.data.types import Int64
from penstock.text.tokenizer import Tokenizer

_EXACT = 2**20
"""Lengths below this are counted one by one (8 MiB); there can be few documents above it."""
_CHUNK_DOCUMENTS = 2**20
_COUNTED_BY_POSITION = 2**22  # beyond, an array of all ids would be larger than a sort is slow
_ENTROPY_CHUNK = 2**20
_ENTROPY_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Document lengths in tokens, end tokens counted."""

    min: int
    """Shortest document."""
    median: int
    """Half the documents are at most this long; the lower one of two middle documents."""
    mean: float
    """Tokens per document."""
    max: int
    """Longest document."""
    histogram: tuple[tuple[int, int, int], ...]
    """(low, high, documents with low <= length < high), powers of two, from the first bin in use to
    the last; empty documents have their own bin (0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The beginning of one document."""

    position: int
    """Corpus position of its first token."""
    text: str
    """Decoded; may hold control characters."""
    whole: bool
    """The text is the whole document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is in a corpus."""

    location: str
    """Where it lies."""
    manifest: Manifest
    """Its manifest."""
    num_bytes: int
    """Bytes of all shards."""
    lengths: Lengths
    """Exact, over all documents."""
    unigram_entropy: float
    """Nats per token; see `unigram_entropy`."""
    samples: tuple[Sample, ...]
    """Spread evenly over the corpus; none where it came without a tokenizer."""


def describe(path: str | Path, *, num_samples: int = 3, sample_tokens: int = 64) -> Description:
    """Read every document offset of a corpus, and a few documents, in bounded memory.

    Raises:
        CorpusError: no corpus there, or a shard that is missing or altered.
    """
    corpus = open_corpus(path)
    shards = range(len(corpus.manifest.shards))
    return Description(
        location=str(path),
        manifest=corpus.manifest,
        num_bytes=sum(shard.bytes for shard in corpus.manifest.shards),
        lengths=measure(lengths for shard in shards for lengths in lengths_of(corpus.shard(shard))),
        unigram_entropy=unigram_entropy(corpus),
        samples=tuple(_samples(corpus, num_samples, sample_tokens)),
    )


def unigram_entropy(corpus: Corpus) -> float:
    """Return the entropy of the token frequencies, in nats: the loss of a model that knows only those.

    Exact up to 64 million tokens; beyond that, of 64 runs of a million spread evenly.
    """
    total, ids, counts = corpus.num_tokens, np.zeros(0, np.int64), np.zeros(0, np.int64)
    chunks = min(_ENTROPY_CHUNKS, -(-total // _ENTROPY_CHUNK))
    for index in range(chunks):
        start = total * index // chunks
        stop = min(start + _ENTROPY_CHUNK, total * (index + 1) // chunks)
        found, times = _counted(corpus.tokens(start, stop))
        # By id, not by position in an array: of another tool's files the vocabulary may not be known.
        ids, of = np.unique(np.concatenate((ids, found)), return_inverse=True)
        counts = np.bincount(of, np.concatenate((counts, times)), minlength=len(ids)).astype(np.int64)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _counted(tokens: Tokens) -> tuple[Int64, Int64]:
    """Return the ids that occur and how often each does."""
    if int(tokens.max()) > _COUNTED_BY_POSITION:
        ids, times = np.unique(tokens, return_counts=True)
        return ids.astype(np.int64), times
    counts = np.bincount(tokens)
    ids = np.flatnonzero(counts)
    return ids, counts[ids]


def lengths_of(shard: TokenShard) -> Iterator[Int64]:
    """Yield the lengths of a shard's documents, in order, some [<= 2**20] int64 at a time."""
    ends = shard.document_ends(0, shard.num_tokens)
    # Documents that end at 0 are empty ones before the first token; no range has their ends.
    if leading := shard.num_documents - len(ends):
        yield np.zeros(leading, np.int64)
    for start in range(0, len(ends), _CHUNK_DOCUMENTS):
        chunk = ends[start : start + _CHUNK_DOCUMENTS]
        before = int(ends[start - 1]) if start else 0
        yield np.diff(chunk, prepend=before)


def measure(chunks: Iterator[Int64] | Sequence[Int64]) -> Lengths:
    """Return exact statistics of lengths that come in chunks; at least one length.

    >>> found = measure([np.array([1, 5]), np.array([6, 0])])
    >>> found.median, found.histogram
    (1, ((0, 1, 1), (1, 2, 1), (2, 4, 0), (4, 8, 2)))
    """
    counts = np.zeros(_EXACT, np.int64)
    longer: list[int] = []
    for lengths in chunks:
        short = lengths < _EXACT
        counts += np.bincount(lengths[short], minlength=_EXACT)
        longer += lengths[~short].tolist()
    longer.sort()
    short_total = int(counts.sum())
    total = short_total + len(longer)
    middle = (total - 1) // 2
    used = np.flatnonzero(counts)
    cumulative = np.cumsum(counts)
    num_tokens = int((counts * np.arange(_EXACT)).sum()) + sum(longer)
    return Lengths(
        min=int(used[0]) if len(used) else longer[0],
        median=int(cumulative.searchsorted(middle, "right"))
        if middle < short_total
        else longer[middle - short_total],
        mean=num_tokens / total,
        max=longer[-1] if longer else int(used[-1]),
        histogram=_histogram(counts, longer),
    )


def _histogram(counts: Int64, longer: list[int]) -> tuple[tuple[int, int, int], ...]:
    bins: list[tuple[int, int, int]] = [(0, 1, int(counts[0]))]
    low = 1
    while low < _EXACT:
        bins.append((low, 2 * low, int(counts[low : 2 * low].sum())))
        low *= 2
    while longer and low <= longer[-1]:
        bins.append((low, 2 * low, sum(low <= length < 2 * low for length in longer)))
        low *= 2
    filled = [number for number, (_, _, count) in enumerate(bins) if count]
    return tuple(bins[filled[0] : filled[-1] + 1])


def _samples(corpus: Corpus, number: int, max_tokens: int) -> Iterator[Sample]:
    if corpus.tokenizer_path is None:
        return
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    seen = -1
    for index in range(number):
        start = corpus.next_document(corpus.num_tokens * index // number)
        if start <= seen or start >= corpus.num_tokens:
            continue
        seen = start
        # One token more than is shown, to tell whether the document goes on.
        first = corpus.fragments([(start, min(start + max_tokens + 1, corpus.num_tokens))]).lengths[0]
        tokens = corpus.tokens(start, start + min(int(first), max_tokens)).tolist()
        yield Sample(position=start, text=tokenizer.decode(tokens), whole=int(first) <= max_tokens)

"""Describe a corpus: sizes, document lengths, and the text of a few documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from penstock.core.arrays import Int64, Tokens
from penstock.data.corpus.columns import LEARNED, REJECTED
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.manifest import Manifest
from penstock.data.corpus.open import open_corpus
from penstock.data.formats import TokenShard
from penstock.text.tokenizer import Tokenizer

_EXACT = 2**20
"""Lengths below this are counted one by one (8 MiB); there can be few documents above it."""
_CHUNK_DOCUMENTS = 2**20
_COUNTED_BY_POSITION = 2**22  # ids up to here are counted in an array; above, sorting is cheaper
_ENTROPY_CHUNK = 2**20
_ENTROPY_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Statistics of document lengths in tokens, end tokens included."""

    min: int
    """Shortest document."""
    median: int
    """Median length; the lower of the two middle ones if their number is even."""
    mean: float
    """Tokens per document."""
    max: int
    """Longest document."""
    histogram: tuple[tuple[int, int, int], ...]
    """(low, high, documents with low <= length < high), powers of two, from the first bin in use to
    the last; empty documents have their own bin (0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """Text at the beginning of one document."""

    position: int
    """Corpus position of its first token."""
    text: str
    """Decoded text; may contain control characters."""
    whole: bool
    """True if the text is the whole document."""
    runs: tuple[tuple[str, str], ...] = ()
    """(kind, text) of consecutive tokens that are alike, special names included: `learned`, `context`, and
    the same with `-rejected` in a pair's second answer; empty for plain text."""


def unigram_entropy(corpus: Corpus) -> float:
    """Return the entropy of the token frequencies in nats: the loss of a model that knows only those.

    Exact up to 64 million tokens; beyond that, of 64 ranges of a million tokens, evenly spread.
    """
    total, ids, counts = corpus.num_tokens, np.zeros(0, np.int64), np.zeros(0, np.int64)
    chunks = min(_ENTROPY_CHUNKS, -(-total // _ENTROPY_CHUNK))
    for index in range(chunks):
        start = total * index // chunks
        stop = min(start + _ENTROPY_CHUNK, total * (index + 1) // chunks)
        found, times = _counted(corpus.tokens(start, stop))
        # Counted by id in a sorted table: the vocabulary of another tool's files may be unknown.
        ids, of = np.unique(np.concatenate((ids, found)), return_inverse=True)
        counts = np.bincount(of, np.concatenate((counts, times)), minlength=len(ids)).astype(np.int64)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Contents of a corpus: sizes, document lengths, entropy, sample texts."""

    location: str
    """Path or address."""
    manifest: Manifest
    """Manifest of the corpus."""
    num_bytes: int
    """Size of all shards in bytes."""
    lengths: Lengths
    """Statistics over all documents, exact."""
    unigram_entropy: float
    """Entropy of the token frequencies in nats per token; see `unigram_entropy`."""
    samples: tuple[TextSample, ...]
    """Evenly spread documents; empty if the corpus has no tokenizer."""


def describe(path: str | Path, *, num_samples: int = 3, sample_tokens: int = 64) -> Description:
    """Read every document offset of a corpus, and a few documents, in bounded memory.

    Raises:
        CorpusError: there is no corpus, or a shard is missing or altered.
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


def _counted(tokens: Tokens) -> tuple[Int64, Int64]:
    """Return the distinct ids and their counts."""
    if int(tokens.max()) > _COUNTED_BY_POSITION:
        ids, times = np.unique(tokens, return_counts=True)
        return ids.astype(np.int64), times
    counts = np.bincount(tokens)
    ids = np.flatnonzero(counts)
    return ids, counts[ids]


def lengths_of(shard: TokenShard) -> Iterator[Int64]:
    """Yield the document lengths of a shard in order, in chunks of at most 2**20 int64."""
    ends = shard.document_ends(0, shard.num_tokens)
    # Documents that end at 0 are empty ones before the first token; `document_ends` does not list them.
    if leading := shard.num_documents - len(ends):
        yield np.zeros(leading, np.int64)
    for start in range(0, len(ends), _CHUNK_DOCUMENTS):
        chunk = ends[start : start + _CHUNK_DOCUMENTS]
        before = int(ends[start - 1]) if start else 0
        yield np.diff(chunk, prepend=before)


def measure(chunks: Iterator[Int64] | Sequence[Int64]) -> Lengths:
    """Return exact statistics of lengths given in chunks; at least one length.

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


def _samples(corpus: Corpus, number: int, max_tokens: int) -> Iterator[TextSample]:
    if corpus.tokenizer_path is None:
        return
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    seen = -1
    for index in range(number):
        start = corpus.next_document(corpus.num_tokens * index // number)
        if start <= seen or start >= corpus.num_tokens:
            continue
        seen = start
        # One token more than is shown, to see whether the document continues.
        first = corpus.fragments([(start, min(start + max_tokens + 1, corpus.num_tokens))]).lengths[0]
        stop = start + min(int(first), max_tokens)
        tokens = corpus.tokens(start, stop).tolist()
        yield TextSample(
            position=start,
            text=tokenizer.decode(tokens),
            whole=int(first) <= max_tokens,
            runs=tuple(_runs(corpus, tokenizer, tokens, start)),
        )


def _runs(
    corpus: Corpus, tokenizer: Tokenizer, tokens: Sequence[int], start: int
) -> Iterator[tuple[str, str]]:
    """Yield the text of consecutive tokens whose bits are alike, with their kind."""
    if LEARNED not in corpus.columns:
        return
    learned, rejected = (_bits(corpus, name, start, start + len(tokens)) for name in (LEARNED, REJECTED))
    kinds = learned + 2 * rejected
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(tokens)]
    for first, past in pairwise(edges):
        if first < past:
            name = "learned" if learned[first] else "context"
            text = tokenizer.decode(tokens[first:past], special=True)
            yield f"{name}-rejected" if rejected[first] else name, text


def _bits(corpus: Corpus, name: str, start: int, stop: int) -> Int64:
    if name not in corpus.columns:
        return np.zeros(stop - start, np.int64)
    found = [corpus.columns[name].values(*span) for span in corpus.spans([(start, stop)])]
    return np.concatenate(found).astype(np.int64)

"""Corpora for benchmarks: documents of given lengths, tokens by a function of their position.

Written shard by shard as Penstock's Arrow, so that a corpus may be larger than memory.
"""

import os
from pathlib import Path

import numpy as np

from penstock.data import open_corpus
from penstock.data.corpus.manifest import Manifest, ShardEntry, save_manifest
from penstock.data.formats.arrow import write_shard

VOCABULARY = 50_000
SHARD_TOKENS = 50_000_000


def lognormal_lengths(num_tokens, *, median=545.0, sigma=1.2, longest=200_000, seed=0):
    """Return document lengths that sum to `num_tokens`; as web text, mean about twice the median."""
    rng = np.random.default_rng(seed)
    count = int(num_tokens / median) + 64
    lengths = np.clip(rng.lognormal(np.log(median), sigma, count), 1, longest).astype(np.int64)
    ends = np.cumsum(lengths)
    kept = int(np.searchsorted(ends, num_tokens))
    if kept == count:
        raise ValueError(f"{count} documents hold fewer than {num_tokens} tokens")
    return np.append(lengths[:kept], num_tokens - (ends[kept - 1] if kept else 0))


def codelike_lengths(num_tokens, *, seed=0):
    """Return document lengths as of source files: many of some lines, a heavy tail of generated ones."""
    rng = np.random.default_rng(seed)
    count = int(num_tokens / 400) + 64
    body = rng.lognormal(np.log(900), 1.5, count)
    tail = 20_000 * (1 + rng.pareto(1.3, count))
    lengths = np.where(rng.random(count) < 0.02, tail, body).clip(1, 2_000_000).astype(np.int64)
    ends = np.cumsum(lengths)
    kept = int(np.searchsorted(ends, num_tokens))
    return np.append(lengths[:kept], num_tokens - (ends[kept - 1] if kept else 0))


def random_tokens(dtype):
    """Return a function (start, stop) -> random tokens of that type."""

    def tokens(start, stop):
        return np.random.default_rng(start).integers(1, VOCABULARY, stop - start, dtype=dtype)

    return tokens


def write(folder, lengths, tokens, *, dtype="uint16", vocab_size=VOCABULARY, shard_tokens=SHARD_TOKENS):
    """Write documents of `lengths` [documents] as a corpus and return its folder.

    Args:
        tokens: function (start, stop) -> the tokens of these corpus positions.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(lengths)
    entries, first = [], 0
    while first < len(lengths):
        start = int(ends[first] - lengths[first])
        past = max(first + 1, int(np.searchsorted(ends, start + shard_tokens, side="right")))
        offsets = np.concatenate(([0], ends[first:past] - start))
        path = folder / f"shard-{len(entries):05d}.arrow"
        write_shard(path, np.asarray(tokens(start, start + int(offsets[-1])), dtype=dtype), offsets)
        sizes = {"tokens": int(offsets[-1]), "documents": past - first, "bytes": path.stat().st_size}
        # No checksum: random tokens of one seed need none, and hashing would double the time.
        entries.append(ShardEntry(name=path.name, checksum="", **sizes))
        first = past
    save_manifest(folder, Manifest(format="arrow", dtype=dtype, vocab_size=vocab_size, shards=tuple(entries)))
    return folder


def read_again(path):
    """Put a file into the page cache by reading it from the disk.

    The system keeps a file that was just written in pages of other sizes than one that was read, which
    decides how often a reader of its memory map faults. Files to be compared must get there in one way.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(2**24):
            pass


def warm(folder):
    """Read a corpus from the disk once, so that its bytes are in the page cache; return it."""
    for path in Path(folder).glob("*.arrow"):
        read_again(path)
    corpus = open_corpus(folder)
    for index, entry in enumerate(corpus.manifest.shards):
        np.add.reduce(corpus.shard(index).tokens[0 : entry.tokens])
    return corpus

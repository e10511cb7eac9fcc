"""Corpora that grow while a test runs: parts appended to a numbered corpus, as preparation appends them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.core.files import checksum
from penstock.data.corpus.manifest import ShardEntry, load_manifest, save_manifest
from penstock.data.formats.arrow import write_shard
from penstock.storage.base import LocalStorage, probe
from penstock.testing.corpora import numbered_corpus


def streamed_corpus(folder: Path, lengths: Sequence[int]) -> Path:
    """Write the first part of a corpus that is read while it is prepared; token p + 1 is at position p."""
    numbered_corpus(folder, lengths)
    manifest = load_manifest(folder)
    save_manifest(
        folder, replace(manifest, vocab_size=1 << 20, parts=(len(manifest.shards),), streamed_parts=0)
    )
    return folder


def grow(folder: Path, lengths: Sequence[int], *, documents_per_shard: int = 7) -> None:
    """Append a part of documents of given lengths; its tokens go on counting."""
    manifest = load_manifest(folder)
    shards, next_token = list(manifest.shards), manifest.num_tokens + 1
    for first in range(0, len(lengths), documents_per_shard):
        offsets = np.cumsum([0, *lengths[first : first + documents_per_shard]], dtype=np.int64)
        path = folder / f"shard-{len(shards):05d}.arrow"
        tokens = np.arange(next_token, next_token + offsets[-1], dtype="uint32")
        write_shard(path, tokens, offsets)
        next_token += len(tokens)
        shards.append(
            ShardEntry(
                name=path.name,
                tokens=len(tokens),
                documents=len(offsets) - 1,
                bytes=path.stat().st_size,
                checksum=checksum(path),
                probe=probe(LocalStorage(folder), path.name),
            )
        )
    parts = (*manifest.part_ends, len(shards))
    save_manifest(folder, replace(manifest, shards=tuple(shards), parts=parts))


def finish(folder: Path) -> None:
    """Declare a streamed corpus complete."""
    manifest = load_manifest(folder)
    save_manifest(folder, replace(manifest, streamed_parts=len(manifest.part_ends)))

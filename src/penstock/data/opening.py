"""Open a corpus wherever it lies: a folder with a manifest."""

from functools import partial
from pathlib import Path

import numpy as np

from penstock.core.errors import CorpusError
from penstock.data.corpus import Corpus
from penstock.data.formats import FORMATS, TokenShard
from penstock.data.manifest import TOKENIZER_FILE, Manifest, load_manifest
from penstock.data.storage import LocalStorage, Storage


def open_corpus(path: str | Path) -> Corpus:
    """Open a corpus folder; reads its manifest and nothing else.

    Raises:
        CorpusError: no corpus there, or its manifest is damaged.
    """
    folder = Path(path)
    manifest = load_manifest(folder)
    tokenizer = folder / TOKENIZER_FILE
    return from_manifest(
        LocalStorage(folder),
        manifest,
        tokenizer_path=tokenizer if manifest.tokenizer and tokenizer.is_file() else None,
    )


def from_manifest(storage: Storage, manifest: Manifest, *, tokenizer_path: Path | None) -> Corpus:
    """Return the corpus that a manifest describes; a shard is opened when one of its tokens is needed."""
    sizes = [0, *(shard.tokens for shard in manifest.shards)]
    return Corpus(
        storage.location,
        manifest,
        starts=np.cumsum(sizes, dtype=np.int64),
        open_shard=partial(_open_shard, storage, manifest),
        tokenizer_path=tokenizer_path,
    )


def _open_shard(storage: Storage, manifest: Manifest, index: int) -> TokenShard:
    """Open a shard and hold it against its manifest: one that was altered must not serve other tokens."""
    entry = manifest.shards[index]
    blob = storage.open(entry.name)
    if blob.size != entry.bytes:
        raise CorpusError(
            f"Shard {blob.name} has {blob.size} bytes, its manifest says {entry.bytes}",
            fix="It is truncated or altered: restore it or prepare the corpus again.",
        )
    shard: TokenShard = FORMATS[manifest.format](storage, entry.name, {})
    if (shard.num_tokens, shard.num_documents) != (entry.tokens, entry.documents):
        raise CorpusError(
            f"Shard {blob.name} holds {shard.num_tokens} tokens in {shard.num_documents} documents, "
            f"its manifest says {entry.tokens} in {entry.documents}",
            fix="Restore it or prepare the corpus again.",
        )
    return shard

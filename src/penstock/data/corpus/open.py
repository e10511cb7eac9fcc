"""Open a corpus: local or remote, Penstock's or another tool's, from text or synthetic."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import CorpusError, UsageError
from penstock.core.files import MANIFEST_FILE, TOKENIZER_FILE
from penstock.core.table import Table
from penstock.data.corpus.columns import attached, columns_of
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.manifest import Manifest, load_manifest, read_manifest
from penstock.data.corpus.spec import SYNTHETIC, TEXT, Spec, parse_spec
from penstock.data.formats import FORMATS, TokenShard, probe_of
from penstock.storage.base import Absent, LocalStorage, Storage, file_sizes, storage_of

if TYPE_CHECKING:
    from penstock.data.corpus.external import OnFile

OPENERS = Table(
    "kind of corpus",
    {
        SYNTHETIC: "penstock.data.corpus.synthetic:open_synthetic",
        TEXT: "penstock.data.prepare.text_corpus:open_text_corpus",
    },
)
"""Corpora without files: kind -> function that opens one from a spec. Loaded by name, so that other corpora
import no tokenizer.
"""
VOCAB_SIZES = Table("kind of corpus", {TEXT: "penstock.data.prepare.text_corpus:vocab_size_of"})
"""Functions that return a corpus's vocabulary size without opening it: spec -> size."""


def open_corpus(path: str | Path, *, columns: str | Path | None = None) -> Corpus:
    """Open a corpus: a folder, an address, or a spec such as `megatron:/data/web` (see spec.py).

    Reads only its manifest. For files of another tool the manifest is built on the first opening and cached.

    Args:
        columns: folder or address of more columns for this corpus, as `ColumnWriter` makes it.

    Raises:
        CorpusError: there is no corpus, or its manifest is damaged; or the columns are of another corpus.
        UsageError: an unknown format or option.
    """
    spec = parse_spec(str(path))
    if spec.format is not None and spec.format in OPENERS:
        opened: Corpus = OPENERS[spec.format](spec)
    else:
        storage, manifest = described(spec)
        opened = from_manifest(storage, manifest, tokenizer_path=tokenizer_path(storage, manifest))
    if columns is not None:
        own = {"fingerprint": opened.fingerprint, "location": opened.location}
        opened.columns = attached(columns, **own, known=opened.columns)
    return opened


def described(spec: Spec, *, on_progress: "OnFile" = lambda _done, _all: None) -> tuple[Storage, Manifest]:
    """Return the storage and the manifest of a corpus with files.

    Args:
        on_progress: called while the manifest of foreign files is built.

    Raises:
        CorpusError: there is no corpus, or it is damaged.
        UsageError: it has no files, or an option is missing or out of range.
    """
    if spec.format == SYNTHETIC:
        raise UsageError("A synthetic corpus has no files", got=f"{SYNTHETIC}:")
    if spec.format == TEXT:
        raise UsageError(
            "A corpus of text has no token files", got=spec.location, fix="Name its cache folder."
        )
    storage = storage_of(spec.location)
    if spec.format == "arrow" or (spec.format is None and _has_manifest(storage)):
        if isinstance(storage, LocalStorage):
            return storage, load_manifest(storage.folder)
        return storage, read_manifest(storage)
    from penstock.data.corpus.external import foreign_manifest

    storage, sizes, prefix = _files(spec.location, storage)
    return storage, foreign_manifest(
        storage, sizes, prefix=prefix, format=spec.format, options=spec.options, on_progress=on_progress
    )


def vocab_size_of(path: str | Path) -> int:
    """Return the vocabulary size of a corpus: every token id is below it. A corpus of text is not prepared.

    Raises:
        CorpusError, UsageError: as `open_corpus`.
    """
    spec = parse_spec(str(path))
    if spec.format is not None and spec.format in VOCAB_SIZES:
        size: int = VOCAB_SIZES[spec.format](spec)
        return size
    return open_corpus(path).manifest.vocab_size


def has_tokenizer(path: str | Path) -> bool:
    """Return True if a corpus names its tokenizer. A corpus of text is not prepared.

    Raises:
        CorpusError, UsageError: as `open_corpus`.
    """
    return parse_spec(str(path)).format in VOCAB_SIZES or open_corpus(path).manifest.tokenizer is not None


def holds_conversations(path: str | Path) -> bool:
    """Return True if a corpus was prepared from conversations. A corpus of text is not prepared.

    Raises:
        CorpusError, UsageError: as `open_corpus`.
    """
    return parse_spec(str(path)).format not in VOCAB_SIZES and open_corpus(path).manifest.chat is not None


def tokenizer_path(storage: Storage, manifest: Manifest) -> Path | Callable[[], Path] | None:
    """Return a corpus's tokenizer file, or a function that fetches it; None if it has none."""
    if not manifest.tokenizer:
        return None
    if not isinstance(storage, LocalStorage):
        return lambda: storage.open(TOKENIZER_FILE).path()  # fetched on first use
    path = storage.folder / TOKENIZER_FILE
    return path if path.is_file() else None


def from_manifest(
    storage: Storage, manifest: Manifest, *, tokenizer_path: Path | Callable[[], Path] | None
) -> Corpus:
    """Return the corpus of a manifest; a shard is opened when one of its tokens is first needed."""
    sizes = [0, *(shard.tokens for shard in manifest.shards)]
    return Corpus(
        storage.location,
        manifest,
        starts=np.cumsum(sizes, dtype=np.int64),
        open_shard=partial(_open_shard, storage, manifest),
        tokenizer_path=tokenizer_path,
        columns=columns_of(storage, manifest),
    )


def _open_shard(storage: Storage, manifest: Manifest, index: int) -> TokenShard:
    """Open a shard and check it against its manifest.

    Raises:
        CorpusError: its size, contents, counts or token type differ.
    """
    entry = manifest.shards[index]
    blob = storage.open(entry.name)
    if blob.size != entry.bytes:
        raise CorpusError(
            f"Shard {blob.name} has {blob.size} bytes, its manifest says {entry.bytes}",
            fix="It is truncated or altered: restore it or prepare the corpus again.",
        )
    if entry.probe and probe_of(manifest.format, storage, entry.name) != entry.probe:
        raise CorpusError(
            f"Shard {blob.name} differs from the one in its manifest, although it has the same size",
            fix="Restore it, or prepare the corpus again.",
        )
    shard: TokenShard = FORMATS[manifest.format].open_shard(storage, entry.name, manifest.options)
    if (shard.num_tokens, shard.num_documents) != (entry.tokens, entry.documents):
        raise CorpusError(
            f"Shard {blob.name} holds {shard.num_tokens} tokens in {shard.num_documents} documents, "
            f"its manifest says {entry.tokens} in {entry.documents}",
            fix="Restore it or prepare the corpus again.",
        )
    if not np.can_cast(dtype := shard.tokens[0:0].dtype, manifest.dtype):
        raise CorpusError(
            f"Shard {blob.name} holds {dtype} tokens, its manifest says {manifest.dtype}",
            fix="Restore it or prepare the corpus again.",
        )
    return shard


def _has_manifest(storage: Storage) -> bool:
    if isinstance(storage, LocalStorage):
        return (storage.folder / MANIFEST_FILE).is_file()
    try:
        storage.open(MANIFEST_FILE)
    except Absent:  # a store that does not answer still raises
        return False
    return True


def _files(location: str, storage: Storage) -> tuple[Storage, dict[str, int], str]:
    """Return the files of a folder, or those whose names start with the last component of a path.

    Returns:
        storage of their folder, sizes in bytes by name, and the prefix of the shard names ("": whole folder).

    Raises:
        CorpusError: there is no such file.
    """
    if isinstance(storage, LocalStorage):
        if storage.folder.is_dir():
            return storage, _visible(storage.sizes()), ""
        parent, leaf = storage.folder.parent, storage.folder.name
        if leaf == MANIFEST_FILE and storage.folder.is_file():
            raise CorpusError(f"{location} is the manifest of a corpus", fix=f"Name its folder: {parent}.")
        beside = parent.iterdir() if parent.is_dir() else iter(())
        sizes = {path.name: size for path, size in file_sizes(beside)}
        storage = LocalStorage(parent)
    else:
        if sizes := _visible(storage.sizes()):
            return storage, sizes, ""
        above, _, leaf = location.rstrip("/").rpartition("/")
        storage = storage_of(above)
        sizes = storage.sizes()
    stem = leaf.rsplit(".", 1)[0]  # companion files share the stem of the named file
    near = {name: size for name, size in sizes.items() if name == leaf or name.startswith(f"{stem}.")}
    if not near:
        raise CorpusError(
            f"Corpus {location} does not exist", fix="Make it with `penstock data prepare INPUT --out DIR`."
        )
    return storage, dict(sorted(near.items(), key=lambda item: item[0].encode())), leaf


def _visible(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files without hidden ones and those in hidden folders (the index folder, for example)."""
    return {n: size for n, size in sizes.items() if not any(part.startswith(".") for part in n.split("/"))}

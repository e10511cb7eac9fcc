"""Open a corpus wherever it lies and whoever made it: with a manifest of its own, foreign, or computed."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from penstock.core.errors import CorpusError, UsageError
from penstock.data.corpus import Corpus
from penstock.data.foreign import OnProgress, foreign_manifest, probe_of
from penstock.data.formats import FORMATS, Options, TokenShard, synthetic
from penstock.data.manifest import FILE, TOKENIZER_FILE, Manifest, ShardEntry, load_manifest, read_manifest
from penstock.data.spec import SYNTHETIC, TEXT, Spec, parse_spec
from penstock.data.storage import Absent, LocalStorage, Storage, file_sizes

_LISTED_SHARDS = 1024
"""A synthetic corpus of more shards is opened without a list of them."""


def open_corpus(path: str | Path) -> Corpus:
    """Open a corpus: a folder, an address, or a spec such as `megatron:/data/web` (see spec.py).

    Reads its manifest and nothing else. The manifest of files that another tool made is made when they are
    first opened, and kept.

    Raises:
        CorpusError: no corpus there, or its manifest is damaged.
        UsageError: an unknown format or option.
    """
    spec = parse_spec(str(path))
    if spec.format == SYNTHETIC:
        return _synthetic(spec.options)
    if spec.format == TEXT:
        return _text(spec)
    storage, manifest = described(spec)
    return from_manifest(storage, manifest, tokenizer_path=tokenizer_path(storage, manifest))


def described(spec: Spec, *, on_progress: OnProgress = lambda _done, _all: None) -> tuple[Storage, Manifest]:
    """Return where the files of a corpus lie and what they are.

    Args:
        on_progress: called while the manifest of foreign files is made.

    Raises:
        CorpusError: no corpus there, or it is damaged.
        UsageError: it has no files, or an option is missing or out of range.
    """
    if spec.format == SYNTHETIC:
        raise UsageError("A synthetic corpus has no files", got=f"{SYNTHETIC}:")
    if spec.format == TEXT:
        raise UsageError("A corpus of text has no files yet", got=spec.location, fix="Name its cache folder.")
    storage = storage_of(spec.location)
    if spec.format == "arrow" or (spec.format is None and _has_manifest(storage)):
        if isinstance(storage, LocalStorage):
            return storage, load_manifest(storage.folder)
        return storage, read_manifest(storage)
    storage, sizes, prefix = _files(spec.location, storage)
    return storage, foreign_manifest(
        storage, sizes, prefix=prefix, format=spec.format, options=spec.options, on_progress=on_progress
    )


def vocab_size_of(path: str | Path) -> int:
    """Return what every token id of a corpus is below; a corpus of text is not prepared for that.

    Raises:
        CorpusError, UsageError: as open_corpus.
    """
    spec = parse_spec(str(path))
    if spec.format == TEXT:
        from penstock.data import text_corpus

        return text_corpus.vocab_size_of(spec)
    return open_corpus(path).manifest.vocab_size


def storage_of(location: str) -> Storage:
    """Return the folder at a path or address; nothing is read."""
    if "://" in location:
        from penstock.data import remote  # loads nothing more than it is needed

        return remote.storage_of(location)
    return LocalStorage(Path(location))


def tokenizer_path(storage: Storage, manifest: Manifest) -> Path | Callable[[], Path] | None:
    """Return the tokenizer that a corpus was made with, or what fetches it; None if it has none."""
    if not manifest.tokenizer:
        return None
    if not isinstance(storage, LocalStorage):
        return lambda: storage.open(TOKENIZER_FILE).path()  # not before it is asked for
    path = storage.folder / TOKENIZER_FILE
    return path if path.is_file() else None


def from_manifest(
    storage: Storage, manifest: Manifest, *, tokenizer_path: Path | Callable[[], Path] | None
) -> Corpus:
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
    if entry.probe and probe_of(manifest.format, storage, entry.name) != entry.probe:
        raise CorpusError(
            f"Shard {blob.name} is not the one that its manifest describes, though of the same size",
            fix="Restore it, or prepare the corpus again.",
        )
    shard: TokenShard = FORMATS[manifest.format](storage, entry.name, manifest.options)
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
        return (storage.folder / FILE).is_file()
    try:
        storage.open(FILE)
    except Absent:  # while a store that does not answer is an error
        return False
    return True


def _files(location: str, storage: Storage) -> tuple[Storage, dict[str, int], str]:
    """Return the files to look at: those of a folder, or those whose names begin as a path ends.

    Returns:
        their folder, their sizes by name, and what the shards' names begin with.

    Raises:
        CorpusError: there is nothing.
    """
    if isinstance(storage, LocalStorage):
        if storage.folder.is_dir():
            return storage, _visible(storage.sizes()), ""
        parent, leaf = storage.folder.parent, storage.folder.name
        if leaf == FILE and storage.folder.is_file():
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
    stem = leaf.rsplit(".", 1)[0]  # a file that belongs to the one that is named has its stem
    near = {name: size for name, size in sizes.items() if name == leaf or name.startswith(f"{stem}.")}
    if not near:
        raise CorpusError(
            f"Corpus {location} does not exist", fix="Make it with `penstock data prepare INPUT --out DIR`."
        )
    return storage, dict(sorted(near.items(), key=lambda item: item[0].encode())), leaf


def _visible(sizes: Mapping[str, int]) -> dict[str, int]:
    """Leave out hidden files and folders, the index folder among them."""
    return {n: size for n, size in sizes.items() if not any(part.startswith(".") for part in n.split("/"))}


def _text(spec: Spec) -> Corpus:
    from penstock.data import text_corpus  # loads the tokenizers' library

    folder, preparation = text_corpus.open_text(spec)
    storage, manifest = LocalStorage(folder), load_manifest(folder)
    corpus = from_manifest(storage, manifest, tokenizer_path=tokenizer_path(storage, manifest))
    corpus.preparation = preparation
    return corpus


def _synthetic(options: Options) -> Corpus:
    made = synthetic.parse(options)
    starts, options = made.starts, made.as_options()

    def opened(index: int) -> TokenShard:
        return synthetic.SyntheticShard(made, made.start(index), made.start(index + 1))

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
    corpus.num_documents = made.num_documents  # which a list that was left out cannot say
    return corpus

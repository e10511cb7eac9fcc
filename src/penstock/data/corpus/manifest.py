"""Manifest of a corpus: its shards, and the fingerprint that identifies it.

A corpus is a folder with `manifest.json`, its shards, and `tokenizer.json`. The manifest is written last, so
a folder that has one is complete. Shards are sorted by the bytes of their names; the fingerprint covers
contents and order, not the path, so a corpus may be moved but not altered.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from penstock.core import config
from penstock.core.errors import CorpusError, PenstockError
from penstock.core.files import MANIFEST_FILE, TOKENIZER_FILE, write_json
from penstock.storage.base import LocalStorage, Storage

VERSION = 1


def tokenizer_at(path: Path | str) -> Path:
    """Return the tokenizer.json in a folder; any other path as it is."""
    inside = Path(path) / TOKENIZER_FILE
    return inside if inside.is_file() else Path(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard file."""

    name: str
    """File name relative to the corpus folder."""
    tokens: int
    """Number of tokens, end-of-document tokens included."""
    documents: int
    """Number of documents, empty ones included."""
    bytes: int
    """Size of the file, checked when it is opened."""
    checksum: str = ""
    """BLAKE2b-256 of the file, hex; checked by `penstock data verify`. Empty for foreign shards."""
    probe: str = ""
    """Hash of the sizes and ends of its files (see probe.py), checked when it is opened; empty: not
    checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a corpus: its format, token type, tokenizer and shards."""

    format: str
    """Reader of the shards: a name in FORMATS."""
    version: int = VERSION
    """Version of the manifest's layout."""
    dtype: Literal["uint16", "uint32"]
    """Type of the stored tokens."""
    vocab_size: int
    """Upper bound: every token id is below it."""
    eos_id: int | None = None
    """Token stored after each document; None: no such token."""
    tokenizer: str | None = None
    """BLAKE2b-256 of tokenizer.json, hex; None if the corpus has no tokenizer."""
    text_bytes: int = 0
    """UTF-8 bytes of the source text, for bits per byte; 0: unknown."""
    rejected: int = 0
    """Inputs rejected when the corpus was prepared; listed in rejected.jsonl."""
    options: dict[str, str] = field(default_factory=dict)
    """Options given by the user that the files do not contain (`eos_id`, ...), passed to the format's
    reader."""
    shards: tuple[ShardEntry, ...]
    """In token order."""
    parts: tuple[int, ...] = ()
    """Number of shards at the end of each part of a corpus that grew; empty: one part. Parts are only
    appended."""
    streamed_parts: int | None = None
    """Parts when the streamed preparation ended, 0 until then; None: the corpus was not streamed."""

    @property
    def part_ends(self) -> tuple[int, ...]:
        """Number of shards at the end of each part."""
        return self.parts or (len(self.shards),)

    @property
    def adoptable_parts(self) -> int:
        """Parts that a run may adopt with `extend_corpus`; 0 for a streamed corpus without appended parts."""
        known, streamed = len(self.part_ends), self.streamed_parts
        return known if streamed is None or 0 < streamed < known else 0

    def first_parts(self, count: int) -> "Manifest":
        """Return the manifest as it was when the corpus had `count` parts."""
        ends = self.part_ends[:count]
        return replace(self, shards=self.shards[: ends[-1]], parts=ends)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """16 hex digits: hash of the contents and their order."""
        shards = [(s.tokens, s.documents, s.checksum or s.probe) for s in self.shards]
        options = [self.options] if self.options else []
        return config.fingerprint([self.format, self.dtype, self.vocab_size, shards, *options])


def load_manifest(folder: Path) -> Manifest:
    """Read a corpus's manifest.

    Raises:
        CorpusError: the folder is missing, is not a finished corpus, or its manifest is damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        make = "Make it with `penstock data prepare INPUT --out DIR`."
        if folder.is_file():
            own = folder.name == MANIFEST_FILE
            fix = f"Name the folder: {folder.parent}." if own else f"Name the folder of a corpus. {make}"
            raise CorpusError(f"{folder} is a file, not the folder of a corpus", fix=fix)
        state = "has no manifest.json" if folder.is_dir() else "does not exist"
        raise CorpusError(f"Corpus {folder} {state}", fix=make)
    return read_manifest(LocalStorage(folder))


def read_manifest(storage: Storage) -> Manifest:
    """Read the manifest of a local or remote corpus.

    Raises:
        CorpusError: it is missing, damaged, of a newer Penstock, names files outside the corpus, or lists no
            tokens.
    """
    blob = storage.open(MANIFEST_FILE)
    try:
        manifest = config.build(Manifest, config.load_json(blob.path()))
    except PenstockError as error:
        raise CorpusError(
            f"{blob.name} is damaged: {error}", fix="Restore it or prepare the corpus again."
        ) from None
    if manifest.version != VERSION:
        raise CorpusError(
            f"{blob.name} has layout {manifest.version}, this Penstock reads layout {VERSION}",
            fix="Read the corpus with the Penstock that made it, or prepare it again.",
        )
    for shard in manifest.shards:
        name = PurePosixPath(shard.name)
        if name.is_absolute() or ".." in name.parts:
            raise CorpusError(
                f"{blob.name} names a shard outside the corpus",
                got=shard.name,
                fix="Restore it or prepare the corpus again.",
            )
    if not manifest.num_tokens:
        raise CorpusError(
            f"Corpus {storage.location} has no tokens", fix="Prepare it from inputs that hold text."
        )
    return manifest


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a corpus's manifest, which marks the corpus as complete."""
    write_json(folder / MANIFEST_FILE, config.dump(manifest))

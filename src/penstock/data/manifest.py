"""The manifest of a corpus: what its shards are, and the fingerprint that identifies it.

A corpus is a folder with `manifest.json`, its shards, and `tokenizer.json`. The manifest is written
last, so a folder that has one is complete. Shard order is the order of names sorted by bytes; the
fingerprint covers contents and order, not the path, so a corpus may be moved but not altered.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from penstock.core import config
from penstock.core.errors import CorpusError, PenstockError
from penstock.core.files import write_json
from penstock.data.storage import LocalStorage, Storage

FILE = "manifest.json"
VERSION = 1
TOKENIZER_FILE = "tokenizer.json"


def tokenizer_at(path: Path | str) -> Path:
    """Return the tokenizer.json that a path means: that of the folder, if it has one, else the path."""
    inside = Path(path) / TOKENIZER_FILE
    return inside if inside.is_file() else Path(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard file."""

    name: str
    """File name inside the corpus folder."""
    tokens: int
    """Tokens in it, end-of-document tokens counted."""
    documents: int
    """Documents in it."""
    bytes: int
    """File size; a cheap check at opening."""
    checksum: str = ""
    """BLAKE2b-256 of the file, hex; checked by `penstock data verify`. Empty for foreign shards."""
    probe: str = ""
    """Hash of the sizes and ends of its files (see probe.py), checked when it is opened; empty: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a reader must know before it opens a shard."""

    format: str
    """Name of the reader in FORMATS."""
    version: int = VERSION
    """Layout of this file."""
    dtype: Literal["uint16", "uint32"]
    """Type of a stored token."""
    vocab_size: int
    """Every token id is below it."""
    eos_id: int | None = None
    """Token stored after each document, or None."""
    tokenizer: str | None = None
    """BLAKE2b-256 of tokenizer.json, hex, or None when the corpus came without one."""
    text_bytes: int = 0
    """UTF-8 bytes of the text the tokens came from; 0 when unknown. For bits per byte."""
    rejected: int = 0
    """Inputs left out when the corpus was prepared; listed in rejected.jsonl."""
    options: dict[str, str] = field(default_factory=dict)
    """What the format's files leave open, as the user said it; handed to its reader."""
    shards: tuple[ShardEntry, ...]
    """In token order."""
    parts: tuple[int, ...] = ()
    """Number of shards at the end of each part, for a corpus that grew; absent: all are one part. Parts are
    only ever appended."""
    streamed_parts: int | None = None
    """For a corpus that may be read while it is prepared: its parts when that ended, 0 until then."""

    @property
    def part_ends(self) -> tuple[int, ...]:
        """Number of shards at the end of each part."""
        return self.parts or (len(self.shards),)

    @property
    def adoptable_parts(self) -> int:
        """Parts that a run may be told to take up; 0 for a streamed corpus that nothing was appended to."""
        known, streamed = len(self.part_ends), self.streamed_parts
        return known if streamed is None or 0 < streamed < known else 0

    def first_parts(self, count: int) -> "Manifest":
        """Return the manifest as it was when the corpus had so many parts."""
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
        """16 hex digits over the contents and their order."""
        shards = [(s.tokens, s.documents, s.checksum or s.probe) for s in self.shards]
        options = [self.options] if self.options else []
        return config.fingerprint([self.format, self.dtype, self.vocab_size, shards, *options])


def load_manifest(folder: Path) -> Manifest:
    """Read a corpus's manifest.

    Raises:
        CorpusError: the folder is missing, is not a finished corpus, or its manifest is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        state = "has no manifest.json" if folder.is_dir() else "does not exist"
        raise CorpusError(
            f"Corpus {folder} {state}", fix="Make it with `penstock data prepare INPUT --out DIR`."
        )
    return read_manifest(LocalStorage(folder))


def read_manifest(storage: Storage) -> Manifest:
    """Read the manifest of a corpus, wherever it lies.

    Raises:
        CorpusError: there is none, it is damaged or of a later Penstock, names files outside the corpus, or
            the corpus has no tokens.
    """
    blob = storage.open(FILE)
    try:
        manifest = config.build(Manifest, config.load_json(blob.path()))
    except PenstockError as error:
        raise CorpusError(
            f"{blob.name} is damaged: {error}", fix="Restore it or prepare the corpus again."
        ) from None
    if manifest.version != VERSION:
        raise CorpusError(
            f"{blob.name} is of layout {manifest.version}, this Penstock reads layout {VERSION}",
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
    """Write a corpus's manifest, which declares the corpus complete."""
    write_json(folder / FILE, config.dump(manifest))

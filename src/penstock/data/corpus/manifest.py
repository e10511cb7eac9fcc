"""Manifest of a corpus: its shards, and the fingerprint that identifies it.

A corpus is a folder with `manifest.json`, its shards, and `tokenizer.json`. The manifest is written last, so
a folder that has one is complete. Shards are sorted by the bytes of their names; the fingerprint covers
contents and order, not the path, so a corpus may be moved but not altered.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from penstock.core import config
from penstock.core.errors import ConfigError, CorpusError, PenstockError, damaged
from penstock.core.files import MANIFEST_FILE, TOKENIZER_FILE, write_json
from penstock.storage.base import LocalStorage, Storage

VERSION = 1


def tokenizer_at(path: Path | str) -> Path:
    """Return the tokenizer.json in a folder; any other path as it is."""
    inside = Path(path) / TOKENIZER_FILE
    return inside if inside.is_file() else Path(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEntry:
    """One column of a corpus: values beside its tokens (see columns.py)."""

    name: str
    """Name of the column, by which a loader delivers it."""
    dtype: Literal["bit", "uint8", "uint16", "uint32", "int32", "int64", "float16", "float32", "float64"]
    """Type of the values; `bit`: eight tokens in a byte, the first in its lowest bit."""
    width: int = 1
    """Values per token; 1 for bits."""

    def __post_init__(self) -> None:
        check_column(self.name, self.width, is_bit=self.dtype == "bit")

    def bytes_of(self, tokens: int) -> int:
        """Return the size of the values of so many tokens."""
        is_bit = self.dtype == "bit"
        return -(-tokens // 8) if is_bit else tokens * self.width * np.dtype(self.dtype).itemsize


def check_column(name: str, width: int, *, is_bit: bool) -> None:
    """Refuse a column that cannot be a file, or a field of a batch.

    Raises:
        ConfigError: with its name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise ConfigError("A column's name must be lower-case letters, digits and underscores", got=name)
    if width < 1 or (is_bit and width != 1):
        raise ConfigError(f"Column {name!r} has a wrong width", got=width, fix="Bits have a width of 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFile:
    """Values of one column for one shard: a file of nothing else, little-endian."""

    name: str
    """File name relative to the folder."""
    bytes: int
    """Size of the file, checked when it is opened."""
    checksum: str
    """BLAKE2b-256 of the file, hex; checked by `penstock data verify`."""
    probe: str
    """Hash of the size and ends of the file, checked when it is opened."""
    ones: int = 0
    """Number of ones in a column of bits; 0 for other columns."""


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
    columns: tuple[ColumnFile, ...] = ()
    """Its columns, as many as the manifest names and in their order."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the shard's file and of those of its columns."""
        return (self.name, *(column.name for column in self.columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOrigin:
    """Settings with which a corpus of conversations was made."""

    kind: Literal["conversations", "pairs", "thumbs"]
    """`pairs`: chosen and rejected answers; `thumbs`: answers wanted or not."""
    template: str
    """Hash of the chat template, 16 hex digits."""
    train_on: str
    """Assistant turns that are learned."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts: turns learned, turns of which the template dropped reasoning, conversations cut."""


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
    columns: tuple[ColumnEntry, ...] = ()
    """Columns of every shard."""
    chat: ChatOrigin | None = None
    """Settings of the conversations; None: the corpus is of plain text."""
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
        rest: list[Any] = [self.options] if self.options else []  # Any: JSON values
        if self.columns:
            rest += [[c.name, c.dtype, c.width] for c in self.columns]
            rest += [[file.checksum for file in shard.columns] for shard in self.shards]
        return config.fingerprint([self.format, self.dtype, self.vocab_size, shards, *rest])

    def count(self, column: str) -> int | None:
        """Return the number of ones in a column of bits; None if there is no such column."""
        index = next((i for i, entry in enumerate(self.columns) if entry.name == column), None)
        return None if index is None else sum(shard.columns[index].ones for shard in self.shards)


def load_manifest(folder: Path | str) -> Manifest:
    """Read a corpus's manifest.

    Raises:
        CorpusError: the folder is missing, is not a finished corpus, or its manifest is damaged.
    """
    folder = Path(folder)
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
        raw = config.load_json(blob.path())
        raw.pop("whole_texts", None)  # which every manifest of November 2026 has
        manifest = config.build(Manifest, raw)
    except PenstockError as error:
        raise CorpusError(damaged(blob.name, error), fix="Restore it or prepare the corpus again.") from None
    if manifest.version != VERSION:
        raise CorpusError(
            f"{blob.name} has layout {manifest.version}, this Penstock reads layout {VERSION}",
            fix="Read the corpus with the Penstock that made it, or prepare it again.",
        )
    for shard in manifest.shards:
        for file in shard.files:
            check_inside(file, blob.name)
        if len(shard.columns) != len(manifest.columns):
            raise CorpusError(
                f"{blob.name} has the columns {', '.join(c.name for c in manifest.columns) or 'none'}, but "
                f"shard {shard.name} has {len(shard.columns)} of them",
                fix="Every part of a corpus has the same columns: restore it or prepare the corpus again.",
            )
    if not manifest.num_tokens:
        raise CorpusError(
            f"Corpus {storage.location} has no tokens", fix="Prepare it from inputs that hold text."
        )
    return manifest


def check_inside(file: str, of: str) -> None:
    """Refuse the name of a file outside the corpus's folder.

    Raises:
        CorpusError: with the name.
    """
    name = PurePosixPath(file)
    if name.is_absolute() or ".." in name.parts:
        raise CorpusError(
            f"{of} names a shard outside the corpus", got=file, fix="Restore it or prepare the corpus again."
        )


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a corpus's manifest, which marks the corpus as complete."""
    values = config.dump(manifest)
    if manifest.chat is None:
        del values["chat"]
    if not manifest.columns:  # as earlier versions read it
        del values["columns"]
        for shard in values["shards"]:
            del shard["columns"]
    write_json(folder / MANIFEST_FILE, values)

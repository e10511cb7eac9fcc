"""Token columns: values beside a corpus's tokens, such as which tokens are learned.

A column has one value (or `width` values) per token, in a file per shard beside the shards: bits, or numbers
of one type, little-endian and nothing else. The manifest names the columns and holds each file's checksum. A
file is read in place, from a memory map or the block cache, as tokens are.

    learned    bit     1: the token is learned. The loader sets the label of every other token to -100
    rejected   bit     preference pairs: 0 in the chosen answer with its prompt, 1 in the rejected one

Columns that are computed from a finished corpus (the log-probabilities of a reference model, say) are written
into a folder of their own, so that the corpus is never altered; the folder names the corpus by its
fingerprint:

    with ColumnWriter(folder, corpus.manifest, [ColumnEntry(name="reference", dtype="float32")]) as writer:
        writer.put("reference", position, values)   # values of the tokens from a corpus position on
    Loader({"pairs": path}, columns={"pairs": folder}, fields=(..., "reference"))

In a batch, entry t of a column describes the token that *label* t names; where there is no label it is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from penstock.core import config
from penstock.core.arrays import Array, Bits, address
from penstock.core.errors import CorpusError, PenstockError, UsageError, damaged, nearest
from penstock.core.files import checksum, commit, remove_tree, temporary_beside, write_atomic, write_json
from penstock.data.corpus.manifest import ColumnEntry, ColumnFile, Manifest, check_inside
from penstock.storage.base import FarSlices, LocalStorage, NextUse, Slices, Storage, probe, storage_of

LEARNED = "learned"
"""Column of bits: 1 if the token is learned."""
REJECTED = "rejected"
"""Column of bits: 1 in the rejected answer of a pair, or all of an answer that is not wanted."""
TEACHER_IDS = "teacher_ids"
"""Column of a folder: ids of a teacher's k most likely tokens, the most likely first."""
TEACHER_LOG_PROBS = "teacher_logprobs"
"""Column of a folder: their log-probabilities in nats."""
INDEX_FILE = "columns.json"
"""Index of a folder of columns."""

_OPEN_SHARDS = 1024


def learned_share(manifest: Manifest) -> str | None:
    """Return how many tokens of a corpus are learned, for people; None: all are."""
    learned = manifest.count(LEARNED)
    if learned is None:
        return None
    return f"{learned:,} of {manifest.num_tokens:,} tokens ({learned / max(manifest.num_tokens, 1):.1%})"


class TokenColumn:
    """One column of a corpus, opened shard by shard. Thread-safe.

    Args:
        files: one per shard.
    """

    def __init__(self, entry: ColumnEntry, files: Sequence[ColumnFile], storage: Storage) -> None:
        self.entry = entry
        self.is_bit = entry.dtype == "bit"
        self.dtype: np.dtype[Any] = np.dtype(np.bool_ if self.is_bit else entry.dtype)  # Any: of the column
        self._files, self._storage = files, storage
        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(self._open)

    def values(self, shard: int, start: int, stop: int) -> Array:
        """Return the values of a shard's tokens [start, stop): [n], or [n, width] if the width is not 1."""
        stored, width = self._shard(shard), self.entry.width
        if self.is_bit:
            first = start // 8
            return unpacked(stored[first : -(-stop // 8)], stop - 8 * first)[start - 8 * first :]
        found = stored[start * width : stop * width].astype(self.dtype, copy=False)
        return found if width == 1 else found.reshape(-1, width)

    def mapped(self, shard: int) -> int | None:
        """Return the address of a shard's values in memory; None if they are fetched."""
        stored = self._shard(shard)
        return address(stored) if isinstance(stored, np.ndarray) else None

    def fetch_ahead(self, shard: int, start: int, stop: int, next_use: NextUse | None = None) -> None:
        """Start fetching the values of a shard's tokens [start, stop), if they are remote.

        Args:
            next_use: predictor for the shard's *tokens*.
        """
        stored = self._shard(shard)
        if not isinstance(stored, FarSlices):
            return
        if self.is_bit:
            if next_use is not None:
                stored.next_use = lambda starts, stops: next_use(8 * starts, 8 * stops)
            stored.fetch_ahead(start // 8, -(-stop // 8))
        else:
            width = self.entry.width
            if next_use is not None:
                stored.next_use = lambda starts, stops: next_use(starts // width, -(-stops // width))
            stored.fetch_ahead(start * width, stop * width)

    def _open(self, shard: int) -> Slices:
        file = self._files[shard]
        blob = self._storage.open(file.name)
        fix = "Restore it, or make the column again."
        if blob.size != file.bytes:
            raise CorpusError(f"Column {blob.name} has {blob.size} bytes, not {file.bytes}", fix=fix)
        if probe(self._storage, file.name) != file.probe:
            raise CorpusError(
                f"Column {blob.name} differs from the one listed, although it has the same size", fix=fix
            )
        dtype = np.dtype(np.uint8 if self.is_bit else self.entry.dtype).newbyteorder("<")
        return blob.array(dtype, offset=0, count=file.bytes // dtype.itemsize)


def unpacked(packed: Array, count: int) -> Bits:
    """Return the first `count` bits of bytes.

    >>> unpacked(np.array([5], np.uint8), 4).tolist()
    [True, False, True, False]
    """
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)


def columns_of(storage: Storage, manifest: Manifest) -> dict[str, TokenColumn]:
    """Return the columns of a corpus by name."""
    return {
        entry.name: TokenColumn(entry, [shard.columns[index] for shard in manifest.shards], storage)
        for index, entry in enumerate(manifest.columns)
    }


def write_column(folder: Path, shard: str, entry: ColumnEntry, values: Array) -> ColumnFile:
    """Write the values of one column for a shard, durably.

    Args:
        shard: the shard's file name.
        values: [tokens] of bool for bits; else [tokens] or [tokens, width].
    """
    name = f"{shard.rsplit('.', 1)[0]}.{entry.name}"
    if entry.dtype == "bit":
        stored = np.packbits(values.astype(np.bool_, copy=False), bitorder="little")
    else:
        stored = np.ascontiguousarray(values, np.dtype(entry.dtype).newbyteorder("<"))
    write_atomic(folder / name, stored.tobytes())
    return described(folder, name, entry, tokens=len(values))


def described(folder: Path, name: str, entry: ColumnEntry, *, tokens: int) -> ColumnFile:
    """Return a written file of a column as it is listed."""
    path, ones = folder / name, 0
    if entry.dtype == "bit" and tokens:
        ones = int(unpacked(np.fromfile(path, np.uint8), tokens).sum())
    size = path.stat().st_size
    return ColumnFile(
        name=name, bytes=size, checksum=checksum(path), probe=probe(LocalStorage(folder), name), ones=ones
    )


def column_faults(storage: Storage, entry: ColumnEntry, file: ColumnFile, *, tokens: int) -> list[str]:
    """Return what is wrong with the file of a column; empty if it is sound."""
    try:
        blob = storage.open(file.name)
        if blob.size != entry.bytes_of(tokens):
            return [f"has {blob.size:,} bytes, {tokens:,} tokens need {entry.bytes_of(tokens):,}"]
        if checksum(blob.path()) != file.checksum:
            return ["altered: its checksum is not the manifest's"]
        if entry.dtype == "bit":
            ones = int(unpacked(np.fromfile(blob.path(), np.uint8), tokens).sum())
            return [] if ones == file.ones else [f"holds {ones:,} ones, the manifest says {file.ones:,}"]
    except CorpusError as error:
        return [str(error)]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnIndex:
    """Index of a folder of columns: `columns.json`."""

    corpus: str
    """Fingerprint of the corpus."""
    columns: tuple[ColumnEntry, ...]
    """The columns."""
    shards: tuple[tuple[ColumnFile, ...], ...]
    """By shard of the corpus, the files of its columns."""
    made_with: dict[str, Any] = field(default_factory=dict)  # Any: JSON values
    """Inputs that the values were computed from, such as a model's hash; checked by `read_index`."""


def read_index(folder: str | Path) -> ColumnIndex:
    """Read the index of a folder of columns.

    Raises:
        CorpusError: it is missing or damaged.
    """
    storage = storage_of(str(folder))
    blob = storage.open(INDEX_FILE)
    try:
        index = config.build(ColumnIndex, config.load_json(blob.path()))
    except PenstockError as error:
        raise CorpusError(damaged(blob.name, error), fix="Make the columns again.") from None
    for file in (file for shard in index.shards for file in shard):
        check_inside(file.name, blob.name)
    return index


def attached(
    folder: str | Path, *, fingerprint: str, location: str, known: Mapping[str, TokenColumn]
) -> dict[str, TokenColumn]:
    """Return the columns of a corpus together with those of a folder.

    Args:
        fingerprint: of the corpus.
        location: of the corpus, for messages.
        known: columns of the corpus itself.

    Raises:
        CorpusError: the folder's columns are of another corpus, or a column is there already.
    """
    index = read_index(folder)
    if index.corpus != fingerprint:
        raise CorpusError(
            f"The columns in {folder} were made for a corpus with fingerprint {index.corpus}, and {location} "
            f"has {fingerprint}",
            fix="Make them again: the corpus is another one, or has grown.",
        )
    storage = storage_of(str(folder))
    found = dict(known)
    for number, entry in enumerate(index.columns):
        if entry.name in found:
            raise CorpusError(f"{location} already has a column", got=entry.name, fix="Leave it out.")
        found[entry.name] = TokenColumn(entry, [shard[number] for shard in index.shards], storage)
    return found


class ColumnWriter:
    """Writer of a folder of columns for a finished corpus; values come in any order.

    The folder appears when the writer is closed. Values that are never put are 0. Several processes of one
    machine may put values into the same columns at once: each opens a writer with the same arguments and
    `finishes=False`, and the one that finishes closes last.

    Args:
        folder: folder to make; an existing one is refused.
        manifest: of the corpus.
        entries: the columns.
        made_with: what the values depend on, as JSON values.
        finishes: True to publish the folder when the writer is closed.

    Raises:
        UsageError: the folder exists.
    """

    def __init__(
        self,
        folder: Path | str,
        manifest: Manifest,
        entries: Sequence[ColumnEntry],
        *,
        made_with: Mapping[str, Any] | None = None,  # Any: JSON values
        finishes: bool = True,
    ) -> None:
        folder = Path(folder)
        if folder.exists():
            raise UsageError(f"{folder} exists", fix="Name a folder that does not, or remove it.")
        self.folder, self._manifest, self._entries = folder, manifest, tuple(entries)
        self._made_with, self._finishes = dict(made_with or {}), finishes
        made_of = [manifest.fingerprint, [config.dump(entry) for entry in entries], self._made_with]
        # What a killed run left is of the same values; that of others has another name.
        self._work = temporary_beside(folder.with_name(f"{folder.name}-{config.fingerprint(made_of)}"))
        self._work.mkdir(parents=True, exist_ok=True)
        self._starts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)])
        self._maps: dict[tuple[str, int], Array] = {}

    def put(self, column: str, position: int, values: Array) -> None:
        """Store the values of the tokens from a corpus position on: [n], or [n, width].

        Raises:
            UsageError: no such column, or the tokens are not all in the corpus.
        """
        entry = next((entry for entry in self._entries if entry.name == column), None)
        if entry is None:
            names = [entry.name for entry in self._entries]
            raise UsageError("No such column", got=column, fix=nearest(column, names))
        stop = position + len(values)
        if not 0 <= position <= stop <= int(self._starts[-1]):
            raise UsageError(f"The corpus has {int(self._starts[-1]):,} tokens", got=(position, stop))
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        while position < stop:
            first, past = int(self._starts[shard]), int(self._starts[shard + 1])
            count = min(stop, past) - position
            if count > 0:
                self._map(entry, shard)[position - first : position - first + count] = values[:count]
                position, values = position + count, values[count:]
            shard += 1

    def close(self) -> None:
        """Write everything to disk, and publish the folder if this writer `finishes`."""
        for stored in self._maps.values():
            stored.flush()  # type: ignore[attr-defined]  # a memory map
        self._maps.clear()
        if not self._finishes:
            return
        shards = []
        for shard in range(len(self._manifest.shards)):
            files = []
            for entry in self._entries:
                tokens = self._manifest.shards[shard].tokens
                self._map(entry, shard)  # a shard of which nothing was put
                self._maps.clear()
                if entry.dtype == "bit":
                    flags = np.fromfile(self._raw(entry, shard), np.bool_)
                    files.append(write_column(self._work, f"{shard:05d}.", entry, flags))
                    self._raw(entry, shard).unlink()
                else:
                    name = self._raw(entry, shard).name
                    files.append(described(self._work, name, entry, tokens=tokens))
            shards.append(tuple(files))
        index = ColumnIndex(
            corpus=self._manifest.fingerprint,
            columns=self._entries,
            shards=tuple(shards),
            made_with=self._made_with,
        )
        write_json(self._work / INDEX_FILE, config.dump(index))
        commit(self._work, self.folder)

    def __enter__(self) -> "ColumnWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._finishes:
            self._maps.clear()
            remove_tree(self._work)

    def _raw(self, entry: ColumnEntry, shard: int) -> Path:
        return self._work / f"{shard:05d}.{entry.name}{'.bytes' if entry.dtype == 'bit' else ''}"

    def _map(self, entry: ColumnEntry, shard: int) -> Array:
        """Return a memory map of a shard's values, bits as bytes: [tokens], or [tokens, width]."""
        found = self._maps.get((entry.name, shard))
        if found is None:
            path, tokens = self._raw(entry, shard), self._manifest.shards[shard].tokens
            dtype = np.dtype(np.bool_ if entry.dtype == "bit" else entry.dtype).newbyteorder("<")
            with path.open("ab") as file:  # zeros that take no space until they are written
                file.truncate(tokens * entry.width * dtype.itemsize)
            shape = (tokens,) if entry.width == 1 else (tokens, entry.width)
            found = np.memmap(path, dtype, "r+", shape=shape) if tokens else np.zeros(shape, dtype)
            if len(self._maps) >= _OPEN_SHARDS:
                self._maps.clear()
            self._maps[entry.name, shard] = found
        return found

"""Shard writer: collect documents, then write each finished shard to disk atomically."""

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.core.arrays import Bits, Tokens
from penstock.core.errors import InputError
from penstock.core.files import checksum, commit, temporary_beside
from penstock.data.corpus.columns import LEARNED, REJECTED, write_column
from penstock.data.corpus.manifest import ColumnEntry, ShardEntry
from penstock.data.formats.arrow import write_shard
from penstock.storage.base import LocalStorage, probe

MAX_SHARDS = 100_000
"""Five digits: with more, the byte order of names would not be the order of shards."""


class ShardBuilder:
    """Shard being filled, in memory: 2 or 4 bytes per token and 8 per document.

    Args:
        limit_of: number of a shard -> its maximum number of tokens.
        number: number of the first shard to fill.
        columns: columns of bits that every document has.
    """

    def __init__(
        self,
        dtype: type[np.uint16 | np.uint32],
        *,
        limit_of: Callable[[int], int],
        number: int,
        columns: Sequence[ColumnEntry] = (),
    ) -> None:
        self._columns = columns
        self._bits: dict[str, list[Bits]] = {entry.name: [] for entry in columns}
        self._limit_of = limit_of
        self._limit = limit_of(number)
        self._tokens = _empty(min(self._limit, 2**20), dtype)
        self._offsets = array("q", [0])

    @property
    def num_tokens(self) -> int:
        """Tokens collected since the last shard."""
        return self._offsets[-1]

    @property
    def num_documents(self) -> int:
        """Documents collected since the last shard."""
        return len(self._offsets) - 1

    def fits(self, tokens: Tokens) -> bool:
        """Return True if a document may still be added; an empty shard accepts any."""
        return not self.num_documents or self.num_tokens + len(tokens) <= self._limit

    def add(self, tokens: Tokens, columns: Mapping[str, Bits]) -> None:
        """Append a copy of one document.

        Args:
            columns: the bits of its tokens, by column.
        """
        for name, held in self._bits.items():
            held.append(columns[name])
        start, stop = self.num_tokens, self.num_tokens + len(tokens)
        if stop > len(self._tokens):
            grown = _empty(max(stop, min(2 * len(self._tokens), self._limit)), self._tokens.dtype.type)
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start:stop] = tokens
        self._offsets.append(stop)

    def finish(self, folder: Path, number: int) -> ShardEntry:
        """Write the collected documents as shard `number`, durably, and start the next.

        Raises:
            OSError: the disk is full; no partial shard is left.
        """
        path = folder / shard_name(number)
        temporary = temporary_beside(path)
        try:
            write_shard(temporary, self._tokens[: self.num_tokens], np.frombuffer(self._offsets, np.int64))
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            entry = ShardEntry(
                name=path.name,
                tokens=self.num_tokens,
                documents=self.num_documents,
                bytes=temporary.stat().st_size,
                checksum=checksum(temporary),
                probe=probe(LocalStorage(folder), temporary.name),
                columns=tuple(
                    write_column(folder, path.name, column, np.concatenate(self._bits[column.name]))
                    for column in self._columns
                ),
            )
            commit(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._offsets = array("q", [0])
        self._bits = {name: [] for name in self._bits}
        self._limit = self._limit_of(number + 1)
        return entry


def _empty(size: int, dtype: type[np.uint16 | np.uint32]) -> Tokens:
    return np.empty(size, np.uint16) if dtype is np.uint16 else np.empty(size, np.uint32)


def shard_name(number: int) -> str:
    """Return the file name of a shard.

    >>> shard_name(7)
    'shard-00007.arrow'
    """
    if number >= MAX_SHARDS:
        fix = f"Choose a larger --shard-tokens; a corpus has at most {MAX_SHARDS:,} shards."
        raise InputError("Too many shards", got=number + 1, fix=fix)
    return f"shard-{number:05d}.arrow"


def shard_files(folder: Path) -> Iterator[Path]:
    """Yield the files of shards and their columns in a folder, finished and partial ones."""
    for suffix in ("arrow", LEARNED, REJECTED):
        yield from folder.glob(f"shard-[0-9][0-9][0-9][0-9][0-9].{suffix}")
        yield from folder.glob(f".shard-[0-9][0-9][0-9][0-9][0-9].{suffix}.tmp")

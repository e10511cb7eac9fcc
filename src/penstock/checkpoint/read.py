"""Read parts of a rank's file, and believe no byte before its checksum; no torch.

What is wanted of a file is sorted and read in windows of whole blocks, so each block is read and checked
once however many small tensors lie in it, and memory stays bounded by the largest tensor.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.checkpoint.find import Saved
from penstock.checkpoint.layout import FileEntry, damaged
from penstock.checkpoint.shard_file import BLOCK_BYTES, Header, block_sums, parse_header
from penstock.core.errors import CheckpointDamaged

_WINDOW_BYTES = 64 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run of bytes of a file's data, and who takes them."""

    start: int
    stop: int
    take: Callable[[memoryview], None]
    """Receives the bytes; may keep and change them."""


class ShardReader:
    """One file of a checkpoint.

    Args:
        entry: what the index says of it.
    """

    def __init__(self, saved: Saved, file: str, entry: FileEntry) -> None:
        self._saved = saved
        self._file = file
        self._entry = entry
        self._header: Header | None = None

    def header(self) -> Header:
        """Return what the file holds.

        Raises:
            CheckpointDamaged: it is missing, of another length, or its beginning is altered.
        """
        if self._header is None:
            entry = self._entry
            try:
                size = self._saved.place.size(self._saved.name, self._file)
            except OSError as error:
                raise self._damaged(f"{self._file} is missing ({error.strerror or error})") from None
            if size != entry.num_bytes:
                kind = "truncated" if size < entry.num_bytes else "longer than it was written"
                raise self._damaged(f"{self._file} is {kind}: {size:,} of {entry.num_bytes:,} bytes")
            content = self._bytes(0, entry.header_bytes)
            if zlib.crc32(content) != entry.header_crc32:
                raise self._damaged(f"the first {entry.header_bytes:,} bytes of {self._file} were altered")
            try:
                self._header = parse_header(content)
            except ValueError as error:
                raise self._damaged(f"{self._file}: {error}") from None
        return self._header

    @property
    def data_bytes(self) -> int:
        """Bytes of its data."""
        return self._entry.num_bytes - self._entry.header_bytes

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Read runs of bytes and hand each to its taker, in the order of the file.

        Raises:
            CheckpointDamaged: a block that was read does not have its checksum.
        """
        for start, stop, inside in _windows(wanted, size=self.data_bytes):
            content = self.checked(start, stop)
            for each in inside:
                each.take(content[each.start - start : each.stop - start])

    def checked(self, start: int, stop: int) -> memoryview:
        """Return whole blocks of the data.

        Args:
            start: the beginning of a block.
            stop: the end of one, or of the data.

        Raises:
            CheckpointDamaged: one does not have its checksum.
        """
        header = self.header()
        content = self._bytes(header.data_start + start, header.data_start + stop)
        first = start // BLOCK_BYTES
        for number, crc in enumerate(block_sums(content), start=first):
            if number >= len(header.sums) or crc != header.sums[number]:
                at = header.data_start + number * BLOCK_BYTES
                until = min(at + BLOCK_BYTES, self._entry.num_bytes)
                raise self._damaged(f"bytes {at:,} to {until:,} of {self._file} were altered")
        return content

    def _bytes(self, start: int, stop: int) -> memoryview:
        try:
            content = self._saved.place.read(self._saved.name, self._file, start, stop)
        except OSError as error:
            raise self._damaged(f"{self._file} cannot be read: {error.strerror or error}") from None
        if len(content) != stop - start:
            raise self._damaged(f"{self._file} ends before byte {stop:,}")
        return content

    def _damaged(self, why: str) -> CheckpointDamaged:
        return damaged(f"Checkpoint {self._saved}", why)


def _windows(wanted: Sequence[Wanted], *, size: int) -> Iterator[tuple[int, int, list[Wanted]]]:
    """Yield runs of blocks to read, [start, stop) bytes, each with what is wanted of it."""
    start = stop = 0
    inside: list[Wanted] = []
    for each in sorted(wanted, key=lambda each: each.start):
        first = each.start // BLOCK_BYTES * BLOCK_BYTES
        last = min(-(-each.stop // BLOCK_BYTES) * BLOCK_BYTES, size)
        if inside and first <= stop and max(stop, last) - start <= _WINDOW_BYTES:
            stop = max(stop, last)
        else:
            if inside:
                yield start, stop, inside
            start, stop, inside = first, last, []
        inside.append(each)
    if inside:
        yield start, stop, inside

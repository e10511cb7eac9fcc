"""Verified reading of checkpoint files: every byte is checked against its checksum; no torch.

Reads of a file are sorted and merged into windows of whole blocks, so each block is read and checked once
however many small tensors it contains, and memory is bounded by the largest tensor.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from penstock.checkpoint.find import SavedCheckpoint
from penstock.checkpoint.layout import FileEntry, damaged
from penstock.checkpoint.shard_file import BLOCK_BYTES, Header, block_sums, parse_header
from penstock.core.errors import CheckpointDamaged

_WINDOW_BYTES = 64 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class TensorRead:
    """Byte range of a file's data, with its consumer."""

    start: int
    stop: int
    take: Callable[[memoryview], None]
    """Receives the bytes; may keep and change them."""


class ShardReader:
    """One file of a checkpoint.

    Args:
        entry: its entry in the index.
    """

    def __init__(self, saved: SavedCheckpoint, file: str, entry: FileEntry) -> None:
        self._saved = saved
        self._file = file
        self._entry = entry
        self._header: Header | None = None

    def header(self) -> Header:
        """Return the parsed header of the file.

        Raises:
            CheckpointDamaged: it is missing, of another length, or its header was altered.
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
            self._header = parse_header(content)
        return self._header

    @property
    def data_bytes(self) -> int:
        """Size of its data in bytes."""
        return self._entry.num_bytes - self._entry.header_bytes

    def fetch(self, wanted: Sequence[TensorRead]) -> None:
        """Read byte ranges and pass each to its consumer, in file order.

        Raises:
            CheckpointDamaged: a block has a wrong checksum.
        """
        for start, stop, inside in _windows(wanted, size=self.data_bytes):
            content = self.checked(start, stop)
            for each in inside:
                each.take(content[each.start - start : each.stop - start])

    def checked(self, start: int, stop: int) -> memoryview:
        """Return verified whole blocks of the data.

        Args:
            start: start of a block.
            stop: end of a block, or of the data.

        Raises:
            CheckpointDamaged: a block has a wrong checksum.
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


def _windows(wanted: Sequence[TensorRead], *, size: int) -> Iterator[tuple[int, int, list[TensorRead]]]:
    """Yield ranges of whole blocks to read, [start, stop) bytes, each with the reads inside it."""
    start = stop = 0
    inside: list[TensorRead] = []
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


_AT_ONCE = 16 * BLOCK_BYTES


def faults(saved: SavedCheckpoint, *, progress: Callable[[int, int], None] = lambda *_: None) -> list[str]:
    """Return the faults of a checkpoint, one line each, the first of each file; empty if it is sound.

    Args:
        progress: called with (bytes read, all bytes).

    Raises:
        CheckpointError: it is gone, or another version of Penstock wrote it.
    """
    found, done = [], 0
    try:
        index = saved.index()
    except CheckpointDamaged as error:
        return [str(error)]
    elements: dict[str, int] = dict.fromkeys(index.tensors, 0)
    for file, entry in index.files.items():
        reader = ShardReader(saved, file, entry)
        try:
            for name, parts in reader.header().parts.items():
                elements[name] = elements.get(name, 0) + sum(part.box.num_elements for part in parts)
            for start in range(0, reader.data_bytes, _AT_ONCE):
                stop = min(start + _AT_ONCE, reader.data_bytes)
                done += len(reader.checked(start, stop))
                progress(done, index.num_bytes)
        except CheckpointDamaged as error:
            found.append(str(error))
    if not found:
        found += [
            f"Checkpoint {saved} has {elements[name]:,} of {prod(entry.shape):,} elements of {name}"
            for name, entry in index.tensors.items()
            if elements[name] != prod(entry.shape)
        ]
    return found

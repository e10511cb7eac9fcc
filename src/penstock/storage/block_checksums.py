"""Block checksums of a corpus, in one file beside its manifest, to detect wrong bytes on arrival.

Ranges, lengths and ETags do not detect a bit flipped by a proxy or a disk; a manifest's checksums cover whole
shards, which a loader never reads whole. `blocks.checksums` has eight bytes for every 16 KiB (0.05% of the
corpus) and is itself read only where needed.

    magic 8 | u32 bytes per block | u32 files | files x (hash of name 16 | u64 size | u64 first block)
    blocks x BLAKE2b-64
"""

import hashlib
import mmap
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.core.errors import CorpusError
from penstock.core.files import write_atomic
from penstock.storage.base import Blob

FILE = "blocks.checksums"
BLOCK_BYTES = 16_384

_MAGIC = b"PNSTKCK1"
_HEAD = struct.Struct("<8sII")
_ROW = np.dtype([("name", "V16"), ("size", "<u8"), ("first", "<u8")])
_MAX_FILES = 2_000_000

Check = Callable[[int, memoryview], bool]
"""Check: (position, bytes) -> True if the block-aligned bytes have the recorded checksums."""


class Digests:
    """Block checksums of one corpus.

    Raises:
        CorpusError: the file is damaged.
    """

    def __init__(self, blob: Blob) -> None:
        head = blob.read(0, min(_HEAD.size, blob.size))
        magic, block, files = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0)
        self._blocks_at = _HEAD.size + files * _ROW.itemsize
        count = (blob.size - self._blocks_at) // 8
        if magic != _MAGIC or block != BLOCK_BYTES or files > _MAX_FILES or count < 0:
            raise CorpusError(f"{blob.name} is damaged", fix="Restore it, write it again, or delete it.")
        table = np.frombuffer(blob.read(_HEAD.size, self._blocks_at), _ROW)
        self._rows = {row["name"].tobytes(): (int(row["size"]), int(row["first"])) for row in table}
        self._digests = blob.array("V8", offset=self._blocks_at, count=count)
        self._name = blob.name

    def of(self, name: str, size: int) -> Check | None:
        """Return the check of one object; None if it is not listed.

        Raises:
            CorpusError: the object's size differs from the listed size.
        """
        row = self._rows.get(_hash_of(name))
        if row is None:
            return None
        listed, first = row
        if listed != size:
            raise CorpusError(
                f"{name} has {size} bytes, {self._name} says {listed}",
                fix="Upload both from the same corpus, or delete the list of checksums.",
            )

        def check(start: int, content: memoryview) -> bool:
            low = first + start // BLOCK_BYTES
            found = _digests(content)
            return found == self._digests[low : low + len(found) // 8].tobytes()

        return check


def write_block_checksums(folder: Path, names: list[str]) -> Path:
    """Write the block checksums of a corpus's files beside them, for upload with the corpus.

    Args:
        names: shards, relative to the folder.
    """
    rows, parts, first = [], [], 0
    for name in names:
        path = folder / name
        size = path.stat().st_size
        rows.append((_hash_of(name), size, first))
        if size:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
                memoryview(content) as view,
            ):
                parts.append(_digests(view))
        first += -(-size // BLOCK_BYTES)
    head = _HEAD.pack(_MAGIC, BLOCK_BYTES, len(rows))
    target = folder / FILE
    write_atomic(target, head + np.array(rows, _ROW).tobytes() + b"".join(parts))
    return target


def _digests(content: memoryview) -> bytes:
    blocks = (content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES))
    return b"".join(hashlib.blake2b(block, digest_size=8).digest() for block in blocks)


def _hash_of(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()

"""A cheap identity of a shard's files: their sizes and their first and last bytes, never the whole.

A shard that was exchanged for another of equal size is noticed while a run reads, for two small reads a
shard. What only `penstock data verify` notices is a change in the middle of a file.
"""

import hashlib
from collections.abc import Iterator, Sequence

from penstock.data.storage import Absent, Blob, Storage

_END_BYTES = 4096  # one page, and one small request where the file is far away


def probe(storage: Storage, name: str, companions: Sequence[str] = ()) -> str:
    """Return 32 hex digits over the size and the first and last 4 KiB of each file of a shard.

    Args:
        companions: further files, which may be absent; that they are counts.

    Raises:
        CorpusError: the shard is missing or cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _ends(storage.open(name)):
        digest.update(part)
    for other in companions:
        try:
            parts = list(_ends(storage.open(other)))
        except Absent:
            parts = [b"absent"]
        for part in parts:
            digest.update(part)
    return digest.hexdigest()


def _ends(blob: Blob) -> Iterator[bytes]:
    yield blob.size.to_bytes(8, "little")
    if blob.size <= 2 * _END_BYTES:
        yield blob.read(0, blob.size)
    else:
        yield blob.read(0, _END_BYTES)
        yield blob.read(blob.size - _END_BYTES, blob.size)

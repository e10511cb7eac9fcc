"""Storage and blobs: the interface between format readers and local or remote files.

A storage is one folder, local or in an object store. A blob is one object in it. Readers ask a blob for
sliceable arrays and do not know the source of the bytes: a memory map, or the block cache.

A shard replaced by another of equal size is detected while a run reads, by two small reads per shard. A
change in the middle of a file is detected only by `penstock data verify`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Array, Float64, Int64
from penstock.core.errors import CorpusError
from penstock.core.table import Table
from penstock.storage.mapped import map_file


class Absent(CorpusError):
    """The object does not exist, or the user may not see it; any other error leaves that open."""


class Slices(Protocol):
    """Array-like object that can be sliced: a memory map, or a reader that fetches."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitem__(self, part: slice, /) -> Array:
        """Return items [start, stop); the array stays valid while it is referenced."""


class NextUse(Protocol):
    """Predicts the next read of an array's items, so that a cache keeps what is needed soonest."""

    def __call__(self, starts: Int64, stops: Int64, /) -> Float64:
        """Return the number of samples until any of items [start, stop) is read next; inf: never. [n]."""


class FarSlices(ABC):
    """Slices of fetched items, with prefetching and a predictor of the next use.

    An abstract class and not a protocol, because isinstance is called in the inner loop.
    """

    dtype: np.dtype[Any]  # Any: the caller's choice
    next_use: NextUse | None
    """Predictor of the next use, set by the reader that knows the order."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def __getitem__(self, part: slice, /) -> Array:
        """Return items [start, stop); the array stays valid while it is referenced."""

    @staticmethod
    @abstractmethod
    def views(arrays: "Mapping[int, Any]", spans: Iterable[tuple[int, int, int]]) -> list[memoryview]:
        """Return the bytes of items [start, stop) of arrays of this class; cheaper than slicing each.

        Args:
            arrays: arrays by number.
            spans: (number, start, stop), each within its array.
        """

    @abstractmethod
    def is_here(self, start: int, stop: int) -> bool:
        """Return True if items [start, stop) can be read without waiting."""

    @abstractmethod
    def fetch_ahead(self, start: int, stop: int) -> None:
        """Start fetching items [start, stop) in the background."""


class Blob(Protocol):
    """Object of immutable bytes. Thread-safe."""

    name: str
    """Path or address, for messages."""
    size: int
    """Size in bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop).

        Raises:
            CorpusError: the object ends before `stop`, or cannot be read.
        """

    def array(self, dtype: npt.DTypeLike, *, offset: int, count: int) -> Slices:
        """Return `count` items from byte `offset` on; nothing is read before the array is sliced.

        Raises:
            CorpusError: the object ends before the last item.
        """

    def path(self) -> Path:
        """Return the whole object as a local file; a remote one is fetched first."""


class Storage(Protocol):
    """Folder of objects."""

    location: str
    """Path or address of the folder."""

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object below the folder, by relative name, in byte order."""

    def open(self, name: str) -> Blob:
        """Open an object.

        Raises:
            Absent: it is missing.
            CorpusError: it cannot be read.
        """


class LocalBlob:
    """Local file as a memory map: costs address space, and memory only for the bytes that are read."""

    def __init__(self, path: Path) -> None:
        with _reading(path):
            self.size = path.stat().st_size
        self.name = str(path)
        self._path = path

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        if not self.size:
            return np.zeros(0, np.uint8)  # an empty file cannot be mapped
        with _reading(self._path):
            return map_file(self._path)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        check_range(self, start, stop)
        return self._bytes[start:stop].tobytes()

    def array(self, dtype: npt.DTypeLike, *, offset: int, count: int) -> Slices:
        """Return `count` items from byte `offset` on, in place; unaligned if `offset` is."""
        stop = offset + count * np.dtype(dtype).itemsize
        check_range(self, offset, stop)
        return np.asarray(self._bytes[offset:stop]).view(dtype)

    def path(self) -> Path:
        """Return the path of the file."""
        return self._path


def check_range(blob: Blob, start: int, stop: int) -> None:
    """Refuse bytes [start, stop) that a blob does not have.

    Raises:
        CorpusError: with its size.
    """
    if not 0 <= start <= stop <= blob.size:
        raise CorpusError(
            f"{blob.name} has {blob.size} bytes, but bytes {start} to {stop} are needed",
            fix="It is truncated or altered: restore it or make the corpus again.",
        )


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Absent(f"{path} is missing", fix="Restore it, or make the corpus again.") from None
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path} cannot be read: {error}", fix="Check it and its permissions.") from None


def file_sizes(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Yield the regular files among paths, with their sizes; ignore files renamed or removed meanwhile."""
    for path in paths:
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.stat().st_size


class LocalStorage:
    """Local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file below the folder, by relative name, in byte order."""
        files = file_sizes(self.folder.rglob("*"))
        found = {path.relative_to(self.folder).as_posix(): size for path, size in files}
        return dict(sorted(found.items(), key=lambda item: item[0].encode()))

    def open(self, name: str) -> LocalBlob:
        """Map a file into memory."""
        return LocalBlob(self.folder / name)


_END_BYTES = 4096  # one page, and one small request if the file is remote


def probe(storage: Storage, name: str, companions: Sequence[str] = ()) -> str:
    """Return 32 hex digits: a hash of the size and the first and last 4 KiB of each file of a shard.

    Args:
        companions: further files, which may be missing; their presence is part of the hash.

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


_STORAGES = Table("storage", {"remote": "penstock.storage.remote:RemoteStorage"})
"""Remote storage, imported only when an address is opened: local corpora do not need it."""


def storage_of(location: str, options: object = None) -> Storage:
    """Return the storage of a folder's path or an address such as s3://bucket/web; nothing is read or sent.

    Args:
        options: `RemoteOptions` for an address; None: the defaults.

    Raises:
        ConfigError: an invalid address, or one that is not allowed.
    """
    if "://" in location:
        remote: Storage = _STORAGES["remote"](location, options)
        return remote
    return LocalStorage(Path(location))

"""Where a corpus's bytes lie: the seam between readers of formats and local or remote files.

A storage is one folder, local or in an object store. A blob is one object in it. Readers ask a blob for
arrays to slice and never learn how the bytes come: from a memory map, or through a cache of blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.errors import CorpusError
from penstock.data.types import Int64

Array = npt.NDArray[Any]  # Any: the dtype is the caller's choice
Float64 = npt.NDArray[np.float64]


class Absent(CorpusError):
    """There is no such object, or none that this user may know of; any other error says nothing of that."""


class Slices(Protocol):
    """What can be sliced like an array: a memory map, or a reader that fetches."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitem__(self, part: slice, /) -> Array:
        """Return items [start, stop); the array lives as long as anyone holds it."""


class NextUse(Protocol):
    """Says when items of an array are next read, so that a cache keeps what is needed soonest."""

    def __call__(self, starts: Int64, stops: Int64, /) -> Float64:
        """Return the samples until any of items [start, stop) is next read, infinity for never: [n]."""


class FarSlices(ABC):
    """Slices that are fetched, and that are better for knowing what comes.

    A class and no protocol, because who reads asks for it all the time.
    """

    dtype: np.dtype[Any]  # Any: the caller's choice
    next_use: NextUse | None
    """Set by who knows the order of reading."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def __getitem__(self, part: slice, /) -> Array:
        """Return items [start, stop); the array lives as long as anyone holds it."""

    @staticmethod
    @abstractmethod
    def views(arrays: "Mapping[int, Any]", spans: Iterable[tuple[int, int, int]]) -> list[memoryview]:
        """Return the bytes of items [start, stop) of arrays of this class: slices at less cost.

        Args:
            arrays: by any number.
            spans: (number, start, stop), each inside its array.
        """

    @abstractmethod
    def is_here(self, start: int, stop: int) -> bool:
        """Return whether items [start, stop) can be read without waiting."""

    @abstractmethod
    def fetch_ahead(self, start: int, stop: int) -> None:
        """Begin to fetch items [start, stop) in the background."""


class Blob(Protocol):
    """One object: an immutable run of bytes. Thread-safe."""

    name: str
    """Path or address, for messages."""
    size: int
    """Bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop).

        Raises:
            CorpusError: the object ends before `stop`, or cannot be read.
        """

    def array(self, dtype: npt.DTypeLike, *, offset: int, count: int) -> Slices:
        """Return `count` items that start at byte `offset`; nothing is read before it is sliced.

        Raises:
            CorpusError: the object ends before the last item.
        """

    def path(self) -> Path:
        """Return the whole object as a local file; a remote one is fetched first."""


class Storage(Protocol):
    """One folder of objects."""

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
    """A file, mapped into memory: costs address space, not memory, until its bytes are touched."""

    def __init__(self, path: Path) -> None:
        with _reading(path):
            self.size = path.stat().st_size
        self.name = str(path)
        self._path = path

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        if not self.size:
            return np.zeros(0, np.uint8)  # which cannot be mapped
        # numpy's own maps keep a descriptor open each, and a corpus may have more shards than those.
        with _reading(self._path), pa.memory_map(str(self._path)) as source:
            return np.frombuffer(source.read_buffer(), np.uint8)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        self._check(start, stop)
        return self._bytes[start:stop].tobytes()

    def array(self, dtype: npt.DTypeLike, *, offset: int, count: int) -> Slices:
        """Return `count` items that start at byte `offset`, in place; not aligned where `offset` is not."""
        stop = offset + count * np.dtype(dtype).itemsize
        self._check(offset, stop)
        return np.asarray(self._bytes[offset:stop]).view(dtype)

    def path(self) -> Path:
        """Return the file."""
        return self._path

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            raise CorpusError(
                f"{self.name} has {self.size} bytes where bytes {start} to {stop} are needed",
                fix="It is truncated or altered: restore it or make the corpus again.",
            )


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Absent(f"{path} is missing", fix="Restore it, or make the corpus again.") from None
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path} cannot be read: {error}", fix="Check the path and its rights.") from None


def file_sizes(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Yield those that are files, with their bytes; not what another process has renamed meanwhile."""
    for path in paths:
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.stat().st_size


class LocalStorage:
    """A folder of this machine."""

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

"""One remote object as a blob: bytes and arrays that come through the cache when they are sliced."""

import math
import os
import threading
from pathlib import Path
from typing import Protocol
from weakref import ref

import numpy as np
import numpy.typing as npt

from penstock.core.errors import CorpusError
from penstock.data.remote.ahead import Ahead
from penstock.data.remote.cache import WHOLE, Cache, writing_to
from penstock.data.remote.fetcher import Fetcher
from penstock.data.remote.region import REGION_BYTES, Bytes
from penstock.data.storage import Array

_COPY_BYTES = 2**22  # fetched at a time
_PROBE_BYTES = 64  # reads this short are headers and steps of a search: little around them is of use
_PROBE_AROUND_BYTES = 16_384


class NextUse(Protocol):
    """Says when items of an array are next read, so that the cache keeps what is needed soonest."""

    def __call__(self, start: int, stop: int, /) -> float:
        """Return the samples until any of items [start, stop) is next read, infinity for never; quick."""


class RemoteSlices:
    """Items of an object, fetched when they are sliced; a slice inside one region is not copied."""

    next_use: NextUse | None = None
    """Set by who knows the order of reading."""

    def __init__(self, blob: "RemoteBlob", dtype: npt.DTypeLike, *, offset: int, count: int) -> None:
        self._blob = blob
        self._dtype = np.dtype(dtype)
        self._count = count
        self.offset = offset
        self.itemsize = self._dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice, /) -> Array:
        start, stop, step = part.indices(self._count)
        if step != 1:
            raise IndexError("a remote array is sliced with step 1")
        first, past = self._bytes(start, max(start, stop))
        return self._blob.view(first, past).view(self._dtype)

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Begin to fetch items [start, stop) in the background, exactly those."""
        self._blob.fetch_ahead(*self._bytes(start, stop))

    def next_use_of_bytes(self, start: int, stop: int) -> float:
        """Return when bytes [start, stop) of the object are next read through this array.

        An array of which nothing is known is taken to be needed all the time, as an index is.
        """
        first = max(0, (start - self.offset) // self.itemsize)
        past = min(self._count, -(-(stop - self.offset) // self.itemsize))
        if first >= past:
            return math.inf
        return self.next_use(first, past) if self.next_use else 0.0

    def _bytes(self, start: int, stop: int) -> tuple[int, int]:
        return self.offset + start * self.itemsize, self.offset + stop * self.itemsize


class RemoteBlob:
    """An object of one content. Thread-safe.

    Args:
        name: its address.
        key: names its content in the cache.
        read_around: bytes of the aligned window that an unforeseen read fetches.
        ahead: fetches in the background.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        cache: Cache,
        key: str,
        fetcher: Fetcher,
        read_around: int,
        ahead: Ahead,
    ) -> None:
        self.name = name
        self.size = size
        self._cache, self._key, self._fetcher = cache, key, fetcher
        self._around = read_around
        self._ahead = ahead
        self._arrays: list[ref[RemoteSlices]] = []  # few; only ever appended to, so safe to walk
        cache.own(key, self)

    def view(self, start: int, stop: int) -> Bytes:
        """Return bytes [start, stop), read-only: in place where one region holds them, else a copy."""
        self._check(start, stop)
        index = start // REGION_BYTES
        base = index * REGION_BYTES
        if stop <= base + REGION_BYTES:
            region = self._cache.mapped(self._key, index)
            if region is not None and region.ready(start - base, stop - base):
                return region.data[start - base : stop - base]
        if start == stop:
            return np.zeros(0, np.uint8)
        around = self._around if stop - start > _PROBE_BYTES else min(self._around, _PROBE_AROUND_BYTES)
        regions = self._fetcher.regions(start, stop, around=around)
        parts = [
            region.data[max(0, start - low) : stop - low]
            for region, low in zip(regions, range(base, stop, REGION_BYTES), strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        return self.view(start, stop).tobytes()

    def array(self, dtype: npt.DTypeLike, *, offset: int, count: int) -> RemoteSlices:
        """Return `count` items that start at byte `offset`; nothing is fetched before it is sliced."""
        self._check(offset, offset + count * np.dtype(dtype).itemsize)
        made = RemoteSlices(self, dtype, offset=offset, count=count)
        self._arrays.append(ref(made))
        return made

    def path(self) -> Path:
        """Return a copy of the whole object, fetched once; it may be evicted after a quarter of an hour.

        Raises:
            CorpusError: it cannot be fetched, or the cache cannot be written.
        """
        folder = self._cache.folder_of(self._key)
        final = folder / (WHOLE + self.name.rpartition("/")[2])
        with writing_to(folder):
            if not final.is_file() or final.stat().st_size != self.size:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                temporary = folder / f".{final.name}.{os.getpid()}-{threading.get_ident()}.tmp"
                try:
                    with temporary.open("xb") as file:
                        for start in range(0, self.size, _COPY_BYTES):
                            file.write(self._fetcher.get(start, min(start + _COPY_BYTES, self.size)))
                    temporary.rename(final)
                finally:
                    temporary.unlink(missing_ok=True)
                self._cache.wrote(self.size)
            os.utime(final)
        return final

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Begin to fetch bytes [start, stop) in the background, if they are not here."""
        self._check(start, stop)
        for low in range(start, stop, _COPY_BYTES):
            self._ahead.fetch(self, low, min(low + _COPY_BYTES, stop))

    def bring(self, start: int, stop: int) -> None:
        """Fetch bytes [start, stop) into the cache, exactly those."""
        self._fetcher.regions(start, stop)

    def next_use(self, start: int, stop: int) -> float | None:
        """Return the samples until bytes [start, stop) are next read; None where no one said."""
        arrays = [array for known in self._arrays if (array := known())]
        if not any(array.next_use for array in arrays):
            return None
        return min(array.next_use_of_bytes(start, stop) for array in arrays)

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            raise CorpusError(
                f"{self.name} has {self.size} bytes where bytes {start} to {stop} are needed",
                fix="It is truncated or altered: restore it or make the corpus again.",
            )

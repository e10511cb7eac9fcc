"""One remote object as a blob: bytes and arrays that come through the cache when they are sliced."""

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from weakref import ref

import numpy as np
import numpy.typing as npt

from penstock.core.errors import CorpusError
from penstock.data.remote.ahead import Ahead
from penstock.data.remote.cache import WHOLE, Cache, writing_to
from penstock.data.remote.fetcher import Fetcher
from penstock.data.remote.region import REGION_BYTES, REGION_SHIFT
from penstock.data.storage import Array, FarSlices, Float64, NextUse
from penstock.data.types import Int64

_COPY_BYTES = 2**22  # fetched at a time
_SHORT_AROUND_BYTES = 16_384  # around headers and indices, where little else is of use


class RemoteSlices(FarSlices):
    """Items of an object, fetched when they are sliced; a slice inside one region is not copied."""

    def __init__(self, blob: "RemoteBlob", dtype: npt.DTypeLike, *, offset: int, count: int) -> None:
        self._blob = blob
        self._count = count
        self.offset = offset
        self.dtype = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.next_use: NextUse | None = None
        # Wide items are an index, of which each block of tokens needs a few hundred.
        self._around = blob.read_around if self.itemsize < 8 else min(blob.read_around, _SHORT_AROUND_BYTES)
        self._whole = blob.cache.whole_of(blob.key)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice, /) -> Array:
        start, stop, step = part.indices(self._count)
        if step != 1:
            raise IndexError("a remote array is sliced with step 1")
        return np.frombuffer(self._view(start, max(start, stop)), self.dtype)

    @staticmethod
    def views(
        arrays: "Mapping[int, RemoteSlices]", spans: Iterable[tuple[int, int, int]]
    ) -> list[memoryview]:
        """Return the bytes of items [start, stop) of arrays, each inside its array: (array, start, stop).

        This is the loader's inner loop, in which one more call would cost as much as the slice itself.
        """
        ways = {name: (array._whole.get, array.offset, array.itemsize) for name, array in arrays.items()}
        found, size, inside, shift = [], REGION_BYTES, REGION_BYTES - 1, REGION_SHIFT
        for name, start, stop in spans:
            whole, offset, itemsize = ways[name]
            first = offset + start * itemsize
            low = first & inside
            high = low + (stop - start) * itemsize
            region = whole(first >> shift)
            found.append(
                region[low:high] if region is not None and high <= size else arrays[name]._view(start, stop)
            )
        return found

    def is_here(self, start: int, stop: int) -> bool:
        """Return whether items [start, stop) can be read without waiting."""
        first, past = self._bytes(start, stop)
        if first >> REGION_SHIFT in self._whole and past - 1 >> REGION_SHIFT in self._whole:
            return past - first <= REGION_BYTES or self._blob.is_here(first, past)
        return self._blob.is_here(first, past)

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Begin to fetch items [start, stop) in the background, exactly those."""
        self._blob.fetch_ahead(*self._bytes(start, stop))

    def next_uses_of_bytes(self, starts: Int64, stops: Int64) -> Float64:
        """Return when bytes [start, stop) of the object are next read through this array: [n] samples.

        An array of which nothing is known is taken to be needed all the time, as an index is.
        """
        firsts = np.maximum((starts - self.offset) // self.itemsize, 0)
        pasts = np.minimum(-(-(stops - self.offset) // self.itemsize), self._count)
        found = np.full(len(starts), np.inf)
        held = firsts < pasts
        found[held] = self.next_use(firsts[held], pasts[held]) if self.next_use else 0.0
        return found

    def _view(self, start: int, stop: int) -> memoryview:
        first, past = self._bytes(start, stop)
        low = first & (REGION_BYTES - 1)
        region = self._whole.get(first >> REGION_SHIFT)
        if region is None or low + past - first > REGION_BYTES:
            return self._blob.fetched(first, past, around=self._around)
        return region[low : low + past - first]

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
        self.cache, self.key, self._fetcher = cache, key, fetcher
        self.read_around = read_around
        self._ahead = ahead
        self._coming: dict[tuple[int, int], None] = {}  # spans that wait to be fetched ahead
        self._arrays: list[ref[RemoteSlices]] = []  # few; only ever appended to, so safe to walk
        cache.own(key, self)

    def fetched(self, start: int, stop: int, *, around: int) -> memoryview:
        """Return bytes [start, stop), read-only: in place where one region holds them, else a copy.

        Args:
            around: bytes of the aligned window that is fetched if they are not here, and not known to be
                wanted: what waits to be fetched ahead is then fetched at once, as it is.
        """
        base = start // REGION_BYTES * REGION_BYTES
        region = self.cache.use(self.key, base // REGION_BYTES)
        if region and stop - base <= REGION_BYTES and region.ready(start - base, stop - base):
            return region.view[start - base : stop - base]
        if start == stop:
            return memoryview(b"")
        coming = (span for span in list(self._coming) if span[0] <= start < span[1])
        aligned = start // around * around, -(-stop // around) * around
        regions = self._fetcher.regions(start, stop, window=next(coming, aligned))
        parts = [
            region.view[max(0, start - at) : stop - at]
            for region, at in zip(regions, range(base, stop, REGION_BYTES), strict=True)
        ]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def is_here(self, start: int, stop: int) -> bool:
        """Return whether bytes [start, stop) are on disk, mapped and verified."""
        for index in range(start // REGION_BYTES, -(-stop // REGION_BYTES)):
            region, base = self.cache.use(self.key, index), index * REGION_BYTES
            if region is None or not region.ready(max(0, start - base), min(stop - base, REGION_BYTES)):
                return False
        return True

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        self._check(start, stop)
        return self.fetched(start, stop, around=min(self.read_around, _SHORT_AROUND_BYTES)).tobytes()

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
        folder = self.cache.folder_of(self.key)
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
                self.cache.wrote(self.size)
            os.utime(final)
        return final

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Begin to fetch bytes [start, stop) in the background, if they are not here."""
        self._check(start, stop)
        for low in range(start, stop, _COPY_BYTES):
            high = min(low + _COPY_BYTES, stop)
            self._coming[low, high] = None  # before a quick thread takes it out
            if not self._ahead.fetch(self, low, high):
                self._coming.pop((low, high), None)

    def bring(self, start: int, stop: int) -> None:
        """Fetch bytes [start, stop) into the cache, exactly those."""
        try:
            self._fetcher.regions(start, stop, hint=True)
        finally:
            self._coming.pop((start, stop), None)

    def next_uses(self, starts: Int64, stops: Int64) -> Float64 | None:
        """Return the samples until any of bytes [start, stop) is next read; None where no one said."""
        arrays = [array for known in self._arrays if (array := known())]
        if not any(array.next_use for array in arrays):
            return None
        found: Float64 = np.min([array.next_uses_of_bytes(starts, stops) for array in arrays], axis=0)
        return found

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            raise CorpusError(
                f"{self.name} has {self.size} bytes where bytes {start} to {stop} are needed",
                fix="It is truncated or altered: restore it or make the corpus again.",
            )

"""Remote blob: slices of an object are fetched through the cache, also ahead of their use.

An error while prefetching is ignored here: the read itself raises it again. Threads end with their owner;
requests that still wait when the interpreter ends, or when their blob is gone, are dropped.
"""

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Array, Float64, Int64
from penstock.core.errors import CorpusError
from penstock.core.log import EventLog
from penstock.storage.base import FarSlices, NextUse, check_range
from penstock.storage.cache import WHOLE, BlockCache, writing_to
from penstock.storage.cache_region import REGION_BYTES, REGION_SHIFT
from penstock.storage.page_fetcher import Fetcher

_COPY_BYTES = 2**22  # bytes fetched at a time for a copy
_SHORT_AROUND_BYTES = 16_384  # read-around for headers and indices, where neighbours are rarely needed


class RemoteSlices(FarSlices):
    """Items of an object, fetched when sliced; a slice inside one region is not copied."""

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
        """Return the bytes of items [start, stop) of arrays, each within its array: (array, start, stop).

        This is the loader's inner loop: another call would cost as much as the slice itself.
        """
        sources = {name: (array._whole.get, array.offset, array.itemsize) for name, array in arrays.items()}
        found, size, inside, shift = [], REGION_BYTES, REGION_BYTES - 1, REGION_SHIFT
        for name, start, stop in spans:
            whole, offset, itemsize = sources[name]
            first = offset + start * itemsize
            low = first & inside
            high = low + (stop - start) * itemsize
            region = whole(first >> shift)
            found.append(
                region[low:high] if region is not None and high <= size else arrays[name]._view(start, stop)
            )
        return found

    def is_here(self, start: int, stop: int) -> bool:
        """Return True if items [start, stop) can be read without waiting."""
        first, past = self._bytes(start, stop)
        if first >> REGION_SHIFT in self._whole and past - 1 >> REGION_SHIFT in self._whole:
            return past - first <= REGION_BYTES or self._blob.is_here(first, past)
        return self._blob.is_here(first, past)

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Start fetching exactly items [start, stop) in the background."""
        self._blob.fetch_ahead(*self._bytes(start, stop))

    def next_uses_of_bytes(self, starts: Int64, stops: Int64) -> Float64:
        """Return the samples until bytes [start, stop) of the object are read next through this array: [n].

        An array without a predictor (an index, for example) counts as always needed.
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


class Fetches(Protocol):
    """Object that can fetch a range of its bytes."""

    def bring(self, start: int, stop: int) -> None:
        """Fetch exactly bytes [start, stop) into the cache."""


class Ahead:
    """Background threads of one storage."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-remote")
        self._waiting = 0
        self._lock = threading.Lock()

    def fetch(self, blob: Fetches, start: int, stop: int) -> bool:
        """Queue a range of a blob for fetching; return False if the queue is full."""
        with self._lock:
            if self._waiting >= _MAX_WAITING:
                return False
            self._waiting += 1
        self._threads.submit(self._fetch, ref(blob), start, stop)
        return True

    def _fetch(self, blob_or_gone: ReferenceType[Fetches], start: int, stop: int) -> None:
        with self._lock:
            self._waiting -= 1
        blob = blob_or_gone()
        if blob is None or not threading.main_thread().is_alive():
            return
        try:
            blob.bring(start, stop)
        except CorpusError as error:
            log.debug("prefetch_failed", "Fetching ahead failed: {error}", error=error)


class RemoteBlob:
    """One version of a remote object. Thread-safe.

    Args:
        name: its address.
        key: name of the version in the cache.
        read_around: bytes of the aligned window that an unforeseen read fetches.
        ahead: background threads.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        cache: BlockCache,
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
        self._coming: dict[tuple[int, int], None] = {}  # spans queued for prefetching
        self._arrays: list[ref[RemoteSlices]] = []  # few; append-only, so iteration needs no lock
        cache.own(key, self)

    def fetched(self, start: int, stop: int, *, around: int) -> memoryview:
        """Return bytes [start, stop), read-only: in place if one region contains them, else a copy.

        Args:
            around: bytes of the aligned window to fetch on a cache miss; a span queued for prefetching is
                fetched at once instead, without a window.
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
        """Return True if bytes [start, stop) are on disk, mapped and verified."""
        for index in range(start // REGION_BYTES, -(-stop // REGION_BYTES)):
            region, base = self.cache.use(self.key, index), index * REGION_BYTES
            if region is None or not region.ready(max(0, start - base), min(stop - base, REGION_BYTES)):
                return False
        return True

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        check_range(self, start, stop)
        return self.fetched(start, stop, around=min(self.read_around, _SHORT_AROUND_BYTES)).tobytes()

    def array(self, dtype: npt.DTypeLike, *, offset: int, count: int) -> RemoteSlices:
        """Return `count` items from byte `offset` on; nothing is fetched before the array is sliced."""
        check_range(self, offset, offset + count * np.dtype(dtype).itemsize)
        made = RemoteSlices(self, dtype, offset=offset, count=count)
        self._arrays.append(ref(made))
        return made

    def path(self) -> Path:
        """Return a copy of the whole object, fetched once; it may be evicted after 15 minutes.

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
        """Start fetching bytes [start, stop) in the background, if they are not cached."""
        check_range(self, start, stop)
        for low in range(start, stop, _COPY_BYTES):
            high = min(low + _COPY_BYTES, stop)
            self._coming[low, high] = None  # set before a fast thread removes it
            if not self._ahead.fetch(self, low, high):
                self._coming.pop((low, high), None)

    def bring(self, start: int, stop: int) -> None:
        """Fetch exactly bytes [start, stop) into the cache."""
        try:
            self._fetcher.regions(start, stop, hint=True)
        finally:
            self._coming.pop((start, stop), None)

    def next_uses(self, starts: Int64, stops: Int64) -> Float64 | None:
        """Return the samples until any of bytes [start, stop) is read next; None if unknown. [n]."""
        arrays = [array for known in self._arrays if (array := known())]
        if not any(array.next_use for array in arrays):
            return None
        found: Float64 = np.min([array.next_uses_of_bytes(starts, stops) for array in arrays], axis=0)
        return found


log = EventLog(__name__)

_MAX_WAITING = 16_384  # queued spans; a pool of 16 blocks is 16. Beyond, spans are fetched when read

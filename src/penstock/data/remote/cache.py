"""The cache of one machine: a folder of region files, shared by processes without locks, bounded in size.

    FOLDER/regions-1/<32 hex digits: which content of which object>/<number of the region>
                                                                   /whole-<name>: a copy of a small object

The bound is kept by all together: each process counts what it wrote, and after a 64th of the limit looks at
the whole folder and deletes down to seven eighths of it. Up to eight processes stay below the limit whatever
they do; more may pass it by a 64th each.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np

from penstock.core import clock, env
from penstock.core.errors import CorpusError
from penstock.data.remote.eviction import IDLE_S, Entry, victims
from penstock.data.remote.options import RemoteOptions
from penstock.data.remote.region import REGION_BYTES, Region
from penstock.data.storage import Float64
from penstock.data.types import Int64

log = logging.getLogger(__name__)

WHOLE = "whole-"
"""Start of the names of copies of whole objects."""
_MAX_OPEN = 4096  # regions mapped at a time, of the 65,530 maps that Linux allows a process
_HASTE = 64  # share of the limit written between two looks at the folder
_TARGET = 7 / 8


class Owner(Protocol):
    """Who can say when parts of an object are next read."""

    def next_uses(self, starts: Int64, stops: Int64) -> Float64 | None:
        """Return the samples until any of bytes [start, stop) is next read; None where that is not known."""


class Cache:
    """Open regions and the folder they are in. Thread-safe.

    Args:
        boot: names the time since this machine started; None where that cannot be told.
    """

    def __init__(self, options: RemoteOptions, *, boot: str | None) -> None:
        self._options, self._boot = options, boot
        self._folder = options.cache_folder / "regions-1"
        self._opened: dict[tuple[str, int], Region] = {}
        self._whole: defaultdict[str, dict[int, memoryview]] = defaultdict(dict)
        self._owners: WeakValueDictionary[str, Owner] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._sweeping = threading.Lock()
        self._written = 0
        self._limit: int | None = None

    def own(self, key: str, owner: Owner) -> None:
        """Let an object speak for its regions as long as it lives."""
        self._owners[key] = owner

    def folder_of(self, key: str) -> Path:
        """Return the folder of one object's content."""
        return self._folder / key

    def whole_of(self, key: str) -> Mapping[int, memoryview]:
        """Return the regions of an object that can be read without asking, by number, as they come and go.

        They are all there, verified, and marked as used; what marks them anew takes them out of here.
        """
        return self._whole[key]

    def use(self, key: str, index: int) -> Region | None:
        """Return a region that is open, marked as used; None if it is not."""
        if region := self._opened.get((key, index)):
            region.used = True
            if region.whole:
                self._whole[key][index] = region.view
        return region

    def region(self, key: str, index: int, size: int) -> Region:
        """Return a region of an object's content, opened or made.

        Raises:
            CorpusError: the cache's folder cannot be written.
        """
        with self._lock:
            if found := self._opened.get((key, index)):
                return found
            with writing_to(self._folder):
                region = Region(self._folder / key / f"{index:08x}", size, boot=self._boot)
            while len(self._opened) >= _MAX_OPEN:
                self._close_one()
            self._opened[key, index] = region
            return region

    def forget(self, key: str, index: int, region: Region) -> None:
        """Drop a region that was evicted under us."""
        with self._lock:
            if self._opened.get((key, index)) is region:
                self._close(key, index)

    def wrote(self, num_bytes: int) -> None:
        """Count bytes put on disk; now and then look after the bound."""
        with self._lock:
            self._written += num_bytes
            if self._limit is None:
                self._limit = self._options.disk_limit(0)
            due = self._written > self._limit // _HASTE
        if due and self._sweeping.acquire(blocking=False):
            try:
                self.sweep()
            finally:
                self._sweeping.release()

    def sweep(self) -> int:
        """Delete what exceeds the bound and what killed processes left; return the bytes then in use."""
        with self._lock:
            self._written = 0
            mapped = list(self._opened.items())
        for held in list(self._whole.values()):  # those of closed regions too, which a quick reader put there
            held.clear()
        for _, region in mapped:
            region.remember_use()
        entries = list(self._entries())
        used = sum(entry.disk_bytes for entry in entries)
        limit = self._limit = self._options.disk_limit(used)
        if used > limit * _TARGET:
            for entry in victims(entries, excess_bytes=used - int(limit * _TARGET)):
                if _delete(entry.path):
                    used -= entry.disk_bytes
            log.debug("cache swept folder=%s used_bytes=%d limit_bytes=%d", self._folder, used, limit)
        for (key, index), region in mapped:
            if region.is_evicted():
                self.forget(key, index, region)
        return used

    def _close_one(self) -> None:
        """Unmap the region that was opened first of those not used lately."""
        for (key, index), region in self._opened.items():
            if not region.used:
                break
            region.remember_use()
            self._whole[key].pop(index, None)
        idle = (place for place, region in self._opened.items() if not region.used)
        self._close(*next(idle, next(iter(self._opened))))

    def _close(self, key: str, index: int) -> None:
        del self._opened[key, index]
        self._whole[key].pop(index, None)

    def _entries(self) -> Iterator[Entry]:
        now_s = clock.unix_seconds()
        for folder in _listing(self._folder):
            found: list[tuple[os.DirEntry[str], os.stat_result]] = []
            for file in _listing(Path(folder)):
                with contextlib.suppress(OSError):  # evicted by another process
                    status = file.stat()
                    if file.name.endswith(".tmp"):
                        _delete_leftover(Path(file), now_s - status.st_mtime)
                    else:
                        found.append((file, status))
            next_uses = _next_uses(self._owners.get(folder.name), [file.name for file, _ in found])
            for (file, status), next_use in zip(found, next_uses, strict=True):
                yield Entry(Path(file), status.st_blocks * 512, now_s - status.st_mtime, next_use)
            if not found:
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()


def key_of_content(url: str, size: int, tag: str) -> str:
    """Return the name of a content's folder: other content has another name, so nothing here goes stale."""
    return hashlib.blake2b(f"{url}\0{size}\0{tag}".encode(), digest_size=16).hexdigest()


_caches: WeakValueDictionary[tuple[Path, int | None], Cache] = WeakValueDictionary()
_caches_lock = threading.Lock()


def cache_of(options: RemoteOptions) -> Cache:
    """Return this process's cache in a folder: one for all corpora."""
    with _caches_lock:
        place = (options.cache_folder, options.cache_bytes)
        if (cache := _caches.get(place)) is None:
            cache = _caches[place] = Cache(options, boot=env.boot_id())
        return cache


@contextmanager
def writing_to(folder: Path) -> Generator[None]:
    """Turn what a disk may say into an error that names the cache; a file that is gone is the caller's."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorpusError(
            f"The cache of remote corpora in {folder} cannot be written: {error}",
            fix="Free some disk there, or name another folder by PENSTOCK_CACHE.",
        ) from None


def _next_uses(owner: Owner | None, names: list[str]) -> Sequence[float | None]:
    """Ask for all regions of an object at once: a sweep of a large cache asks for a hundred thousand."""
    regions = [name for name in names if not name.startswith(WHOLE)]
    starts = np.array([int(name, 16) for name in regions], np.int64) * REGION_BYTES
    found = None if owner is None else owner.next_uses(starts, starts + REGION_BYTES)
    if found is None:
        return [None] * len(names)
    known = dict(zip(regions, found.tolist(), strict=True))
    return [known.get(name) for name in names]


def _listing(folder: Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # another process has just removed it
        return []


def _delete(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _delete_leftover(path: Path, age_s: float) -> None:
    """Remove the temporary file of a process that is gone: `.NAME.PID-THREAD.tmp`."""
    pid = path.name.split(".")[-2].partition("-")[0]
    if age_s > IDLE_S or not (pid.isdecimal() and env.process_is_alive(int(pid))):
        _delete(path)

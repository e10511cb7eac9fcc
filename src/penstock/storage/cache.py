"""Block cache of a machine: a bounded folder of region files, shared by processes, with eviction.

    FOLDER/regions-1/<32 hex digits: object and version>/<number of the region>
                    /whole-<name>: copy of a small object

All processes enforce the limit together: each counts the bytes it wrote, and after 1/64 of the limit scans
the whole folder and deletes files down to 7/8 of it. Up to eight processes always stay below the limit; each
further one may exceed it by 1/64. A limit below 64 MiB may be exceeded while regions (1 MiB) are written.

The order of training is a function, so the next use of any range of a corpus is known exactly, and evicting
the farthest is then optimal (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5, 1966). Files whose next use is unknown here, such as those of another run, are evicted by
least recent use.
"""

import contextlib
import hashlib
import os
import re
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np

from penstock.core import clock, env
from penstock.core.arrays import Float64, Int64
from penstock.core.errors import CorpusError
from penstock.core.log import EventLog
from penstock.storage.cache_region import REGION_BYTES, Region
from penstock.storage.options import RemoteOptions

log = EventLog(__name__)

WHOLE = "whole-"
"""Prefix of the names of copies of whole objects."""
_REGION = re.compile(r"[0-9a-f]+")
"""Names of regions. Other files are the file system's: NFS renames files that are deleted while open."""
_MAX_OPEN = 4096  # regions mapped at a time; Linux allows a process 65,530 maps
_HASTE = 64  # 1 / share of the limit written between two scans of the folder
_TARGET = 7 / 8


class Owner(Protocol):
    """Object that can predict the next use of its bytes."""

    def next_uses(self, starts: Int64, stops: Int64) -> Float64 | None:
        """Return the number of samples until any of bytes [start, stop) is read next; None: unknown. [n]."""


@dataclass(frozen=True, slots=True)
class CacheFile:
    """File of the cache, as a candidate for eviction."""

    path: Path
    disk_bytes: int
    """Bytes that deleting it frees."""
    age_s: float
    """Seconds since its last use, from its modification time."""
    next_use: float | None = None
    """Samples until its next use, inf: never; None: unknown to this process."""


class BlockCache:
    """Open regions of a cache folder, and its limit. Thread-safe.

    Args:
        boot: id of the machine's present boot; None: unknown.
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
        """Register the predictor of an object's regions, for as long as it lives."""
        self._owners[key] = owner

    def folder_of(self, key: str) -> Path:
        """Return the folder of one version of an object."""
        return self._folder / key

    def whole_of(self, key: str) -> Mapping[int, memoryview]:
        """Return the verified open regions of an object by number, as a live mapping without locks.

        They are marked as used; `sweep` removes them from the mapping to track further use.
        """
        return self._whole[key]

    def use(self, key: str, index: int) -> Region | None:
        """Return an open region and mark it as used; None if it is not open."""
        if region := self._opened.get((key, index)):
            region.used = True
            if region.whole:
                self._whole[key][index] = region.view
        return region

    def region(self, key: str, index: int, size: int) -> Region:
        """Return a region of an object, opening or creating its file.

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
        """Drop a region whose file was evicted."""
        with self._lock:
            if self._opened.get((key, index)) is region:
                self._close(key, index)

    def wrote(self, num_bytes: int) -> None:
        """Count bytes written to disk; regularly enforce the limit."""
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
        """Delete files beyond the limit and leftovers of killed processes; return the bytes then in use."""
        with self._lock:
            self._written = 0
            mapped = list(self._opened.items())
        for held in list(self._whole.values()):  # also of closed regions, added by a concurrent reader
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
            log.debug(
                "cache_swept",
                "Cache {path} was swept: {used_bytes:bytes} of {limit_bytes:bytes} are used",
                path=self._folder,
                used_bytes=used,
                limit_bytes=limit,
            )
        for (key, index), region in mapped:
            if region.is_evicted():
                self.forget(key, index, region)
        return used

    def _close_one(self) -> None:
        """Unmap the oldest region that was not used lately."""
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

    def _entries(self) -> Iterator[CacheFile]:
        now_s = clock.unix_seconds()
        for folder in _listing(self._folder):
            found: list[tuple[os.DirEntry[str], os.stat_result]] = []
            for file in _listing(Path(folder)):
                with contextlib.suppress(OSError):  # evicted by another process
                    status = file.stat()
                    if file.name.endswith(".tmp"):
                        _delete_leftover(Path(file), now_s - status.st_mtime)
                    elif file.name.startswith(WHOLE) or _REGION.fullmatch(file.name):
                        found.append((file, status))
            next_uses = _next_uses(self._owners.get(folder.name), [file.name for file, _ in found])
            for (file, status), next_use in zip(found, next_uses, strict=True):
                yield CacheFile(Path(file), status.st_blocks * 512, now_s - status.st_mtime, next_use)
            if not found:
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()


def key_of_content(url: str, size: int, tag: str) -> str:
    """Return the folder name of a version of an object; another version has another name."""
    return hashlib.blake2b(f"{url}\0{size}\0{tag}".encode(), digest_size=16).hexdigest()


_caches: WeakValueDictionary[tuple[Path, int | None], BlockCache] = WeakValueDictionary()
_caches_lock = threading.Lock()


def cache_of(options: RemoteOptions) -> BlockCache:
    """Return this process's cache in a folder, shared by all corpora."""
    with _caches_lock:
        place = (options.cache_folder, options.cache_bytes)
        if (cache := _caches.get(place)) is None:
            cache = _caches[place] = BlockCache(options, boot=env.boot_id())
        return cache


@contextmanager
def writing_to(folder: Path) -> Generator[None]:
    """Convert disk errors to an error that names the cache; FileNotFoundError passes through."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorpusError(
            f"The cache of remote corpora in {folder} cannot be written: {error}",
            fix="Free some disk space there, or set PENSTOCK_CACHE to another folder.",
        ) from None


def _next_uses(owner: Owner | None, names: list[str]) -> Sequence[float | None]:
    """Return the next uses of all regions of an object in one call: a large cache has 100,000 of them."""
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
    """Remove the temporary file of a dead process: `.NAME.PID-THREAD.tmp`."""
    pid = path.name.split(".")[-2].partition("-")[0]
    if age_s > IDLE_S or not (pid.isdecimal() and env.process_is_alive(int(pid))):
        _delete(path)


IDLE_S = 900.0
"""Seconds of idleness after which a file of unknown next use is evicted before any that will be needed."""


def victims(entries: Iterable[CacheFile], *, excess_bytes: int) -> list[CacheFile]:
    """Return the files to delete, in order, that together free at least `excess_bytes`.

    >>> near, far = CacheFile(Path("a"), 10, 0.0, 5.0), CacheFile(Path("b"), 10, 0.0, 900.0)
    >>> [entry.path.name for entry in victims([near, far], excess_bytes=10)]
    ['b']
    """
    doomed = []
    for entry in sorted(entries, key=_rank):
        if excess_bytes <= 0:
            break
        doomed.append(entry)
        excess_bytes -= entry.disk_bytes
    return doomed


def _rank(entry: CacheFile) -> tuple[int, float, str]:
    """Return the eviction order: idle of unknown use, known by distance, recently used of unknown use."""
    name = f"{entry.path.parent.name}/{entry.path.name}"  # ties have the same order in every process
    if entry.next_use is None:
        return (0 if entry.age_s > IDLE_S else 2), -entry.age_s, name
    return 1, -entry.next_use, name

"""Cache region: part of a remote object in a sparse local file of pages with checksums.

    [ header: magic, data bytes | table: 8 bytes per page ]  4 KiB
    [ page 0 | page 1 | ... | page 255 ]                     1 MiB, less for an object's last region

A table entry is 0 (absent), a claim (a process is fetching the page), or the page's CRC-32 and the boot of
the machine in which it was written or checked. A writer stores the page first and its entry second, so a kill
at any time leaves pages that are absent or complete while the machine runs. Damage by a power failure is
found by the checksum, verified by the first reader of a page after a boot, for all processes of that boot (a
checksum takes longer than reading). Pages are written in place: all writers of a page write the same bytes,
because the file is named by the identity of its object. So there are no locks, no temporary files and no
clean-up; an evicted file stays readable for processes that have it open.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock.core import env
from penstock.core.arrays import Bytes
from penstock.core.log import EventLog
from penstock.storage.mapped import map_file

PAGE_BYTES = 4096
REGION_PAGES = 256
REGION_SHIFT = 20
REGION_BYTES = 1 << REGION_SHIFT
assert REGION_BYTES == PAGE_BYTES * REGION_PAGES

_MAGIC = b"PNSTKRG1"
_HEADER = struct.Struct("<8sQ")
_TABLE = _HEADER.size
_DATA = PAGE_BYTES  # offset of the first page
_PRESENT = 1 << 32
_CLAIMED = 2 << 32
_CRC = 0xFFFFFFFF
_BOOT_SHIFT = 40  # bits above it: boot in which the page was written or checked

log = EventLog(__name__)


class Region:
    """Open region file. Thread-safe.

    Args:
        path: its file; created if missing.
        size: bytes of the object in it, 1 to REGION_BYTES.
        boot: id of the machine's present boot; None: unknown.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """

    def __init__(self, path: Path, size: int, *, boot: str | None = None) -> None:
        self._boot = zlib.crc32(boot.encode()) % 0xFFFFFF + 1 if boot else 0
        self.path = path
        self.size = size
        self.used = True
        """True if it was read since the last sweep of the cache."""
        mapped, self._inode = _map(path, size)
        self._table = mapped[_TABLE : _TABLE + 8 * REGION_PAGES].view("<u8")
        self.data: Bytes = mapped[_DATA:]
        self.view = self.data.data
        """Data as a memoryview, which is faster to slice."""
        self._verified = bytearray(-(-size // PAGE_BYTES))
        self.whole = False
        """True if all pages are present and verified."""

    def ready(self, start: int, stop: int) -> bool:
        """Return True if bytes [start, stop) of the region are present and verified."""
        return self.whole or self._verified.find(0, start // PAGE_BYTES, -(-stop // PAGE_BYTES)) < 0

    def verify(self, pages: range) -> list[int]:
        """Check the pages that are present but unchecked in this boot; return the missing ones.

        A page with a wrong checksum counts as missing.
        """
        checked, missing, trusted = [], [], self._entry(0) >> 32 if self._boot else -1
        for page, entry in zip(pages, self._table[pages.start : pages.stop].tolist(), strict=True):
            if self._verified[page] or entry >> 32 == trusted:
                continue
            if entry & _PRESENT and entry & _CRC == zlib.crc32(self._page(page)):
                checked.append(page)
                continue
            missing.append(page)
            if entry & _PRESENT:
                log.warning(
                    "page_damaged",
                    "Page {page} of {path} in the cache is damaged and is fetched again",
                    page=page,
                    path=self.path,
                )
        if checked and self._boot:
            self._trust(checked)
        self._note_verified(set(pages).difference(missing) if missing else pages)
        return missing

    def claimed_by_another(self, page: int) -> bool:
        """Return True if another live process of this machine is fetching a page."""
        entry = int(self._table[page])
        pid = entry & 0xFFFFFFFF
        return bool(entry & _CLAIMED) and pid != os.getpid() and env.process_is_alive(pid)

    @contextmanager
    def writing(self, first: int, past: int) -> Generator[Callable[[memoryview], None]]:
        """Claim pages [first, past) and yield a function that writes their content.

        The claim is a hint to other processes. It ends with the block; a killed process leaves it behind.

        Raises:
            FileNotFoundError: the file was evicted since it was mapped.
            OSError: the disk is full.
        """
        with self._opened() as descriptor:
            claim = np.uint64(_CLAIMED | os.getpid())
            at = _TABLE + 8 * first
            entries = self._table[first:past]
            os.pwrite(descriptor, np.where(entries & _PRESENT, entries, claim).tobytes(), at)

            def write(content: memoryview) -> None:
                pages = [content[low : low + PAGE_BYTES] for low in range(0, len(content), PAGE_BYTES)]
                written = np.array([self._entry(zlib.crc32(page)) for page in pages], "<u8")
                os.pwrite(descriptor, content, _DATA + first * PAGE_BYTES)
                os.pwrite(descriptor, written.tobytes(), at)
                self._note_verified(range(first, past))

            try:
                yield write
            finally:
                entries = self._table[first:past]
                if (entries == claim).any():
                    os.pwrite(descriptor, np.where(entries == claim, np.uint64(0), entries).tobytes(), at)

    def remember_use(self) -> None:
        """Set the file's time to now if it was read since the last call; eviction uses the time."""
        if self.used:
            self.used = False
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def is_evicted(self) -> bool:
        """Return True if the file at the path is another one or gone; the old one uses disk until closed."""
        try:
            return _inode(self.path.stat()) != self._inode
        except OSError:
            return True

    @contextmanager
    def _opened(self) -> Generator[int]:
        """Open the mapped file for writing; no descriptor is kept, since thousands of files are mapped."""
        with self.path.open("r+b", buffering=0) as file:
            if _inode(os.fstat(file.fileno())) != self._inode:
                raise FileNotFoundError(f"{self.path} was evicted")
            yield file.fileno()

    def _note_verified(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._verified[page] = 1
        self.whole = self._verified.find(0) < 0

    def _trust(self, pages: Sequence[int]) -> None:
        """Mark pages as checked, for the other processes of this boot."""
        with contextlib.suppress(OSError), self._opened() as descriptor:  # else they check themselves
            for page in pages:
                entry = np.array(self._entry(zlib.crc32(self._page(page))), "<u8")
                os.pwrite(descriptor, entry.tobytes(), _TABLE + 8 * page)

    def _entry(self, checksum: int) -> int:
        """Return the table entry of a page written or checked now."""
        return self._boot << _BOOT_SHIFT | _PRESENT | checksum

    def _page(self, page: int) -> memoryview:
        return self.view[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _map(path: Path, size: int) -> tuple[Bytes, tuple[int, int]]:
    """Map a region file, creating or repairing it if necessary; also return its identity."""
    while True:
        # The file and its folder may be evicted at any time.
        with contextlib.suppress(FileNotFoundError):
            made = _make(path, size)
            mapped = map_file(path)
            if len(mapped) == _DATA + size and _inode(path.stat()) == made:
                return mapped, made
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def _make(path: Path, size: int) -> tuple[int, int]:
    """Create a region file of full size if there is none; return its identity."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        header = os.pread(descriptor, _HEADER.size, 0)
        if status.st_size in (0, _DATA + size) and header.strip(b"\0") in (b"", _header(size)):
            if not header.startswith(_MAGIC):
                os.truncate(descriptor, _DATA + size)
                os.pwrite(descriptor, _header(size), 0)
            return _inode(status)
    finally:
        os.close(descriptor)
    path.unlink(missing_ok=True)  # truncated, or a foreign file: start again
    return _make(path, size)


def _header(size: int) -> bytes:
    return _HEADER.pack(_MAGIC, size).rstrip(b"\0")

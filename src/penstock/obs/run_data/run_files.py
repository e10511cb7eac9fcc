"""Files of a run, in a local folder or in an object store, as the console reads them: stamps, ranges, names.

A run in an object store is a copy that somebody uploads again and again, as `aws s3 sync` does: each upload
replaces the whole object. So a file is read at one version, by ranges, and the next look finds the next
version; what was consumed before is recognised by `tail.Tail`, and only what is new is fetched.
"""

import hashlib
import io
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from penstock.core import clock
from penstock.core.errors import CorpusError, UsageError
from penstock.core.files import TOKENIZER_FILE

if TYPE_CHECKING:
    from penstock.storage.object_store import Store, StoredObject

_LOOK_AGAIN_S = 1.0
"""Seconds for which the version of an object is believed: each look is a request, which stores bill."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Stamp of a file, which changes when the file does."""

    modified_s: float
    """Unix time; of an object, of its upload."""
    size: int
    """Bytes."""
    version: str
    """Inode or ETag."""


class RunFiles(Protocol):
    """Files of one run. Methods raise OSError where a file is missing or cannot be read."""

    location: str
    """Path or address of the run's folder."""
    is_stored: bool
    """True if it lies in an object store."""

    @property
    def folder(self) -> Path:
        """The local folder.

        Raises:
            UsageError: the run lies in an object store.
        """

    def stamp(self, name: str) -> FileStamp:
        """Return the stamp of a file."""

    def seen(self, name: str) -> FileStamp:
        """Return the stamp of a file; of an object as it was last seen, without a request."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; an object at the version last seen."""

    def stamps(self, folder: str) -> dict[str, FileStamp]:
        """Return the stamps of a folder's files by name; {} if there is no such folder."""


class LocalFiles:
    """Files of a run in a local folder."""

    is_stored = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)

    def stamp(self, name: str) -> FileStamp:
        """Return the stamp of a file."""
        status = (self.folder / name).stat()
        return FileStamp(status.st_mtime, status.st_size, str(status.st_ino))

    seen = stamp

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; a pipe, on which a reader would wait for ever, is none."""
        descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(f"{self.folder / name} is not a file")
        return os.fdopen(descriptor, "rb")

    def stamps(self, folder: str) -> dict[str, FileStamp]:
        """Return the stamps of a folder's files by name, links left out; {} if there is no such folder."""
        found = {}
        try:
            with os.scandir(self.folder / folder) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        with suppress(OSError):  # deleted meanwhile
                            found[entry.name] = self.stamp(f"{folder}/{entry.name}")
        except OSError:
            pass
        return found


class StoredFiles:
    """Files of a run in an object store. Thread-safe.

    Args:
        store: of the address that was searched.
        prefix: folder of the run below it; empty: the address itself.
        listed: objects of the run's folder, as the last search found them.
    """

    is_stored = True

    def __init__(self, store: "Store", prefix: str, listed: "dict[str, StoredObject]") -> None:
        self.location = f"{store.address.url}/{prefix}".rstrip("/")
        self._store = store
        self._prefix = prefix
        self._lock = Lock()
        self._known: dict[str, tuple[StoredObject, float]] = {}
        self.list(listed)

    def list(self, listed: "dict[str, StoredObject]") -> None:
        """Take over a newer listing of the run's folder, or of a folder in it."""
        now = clock.monotonic()
        with self._lock:
            self._known |= {name: (found, now) for name, found in listed.items()}

    @property
    def folder(self) -> Path:
        """Refuse: there is no local folder."""
        raise UsageError(
            "This needs the run's own folder, and the console reads a copy in an object store",
            got=self.location,
            fix="Start `penstock console` where the run's folder is, or copy it into a local folder.",
        )

    def seen(self, name: str) -> FileStamp:
        """Return the stamp of an object as it was last seen; of a web server, which lists none, look once."""
        return _stamp(self._last_seen(name))

    def stamp(self, name: str) -> FileStamp:
        """Return the stamp of an object, at most a second old."""
        return _stamp(self._look(name))

    def open(self, name: str) -> BinaryIO:
        """Open an object at the version last seen; reading fails once it was replaced."""
        return cast("BinaryIO", _StoredFile(self._store, self._path(name), self._last_seen(name)))

    def stamps(self, folder: str) -> dict[str, FileStamp]:
        """Return the stamps of a folder's objects by name; they may be opened then."""
        if not self._store.address.has_listing:
            return {}
        try:
            _, objects = self._store.folder(self._path(folder))
        except CorpusError:
            return {}
        self.list({f"{folder}/{name}": found for name, found in objects.items()})
        return {name: _stamp(found) for name, found in objects.items()}

    def _last_seen(self, name: str) -> "StoredObject":
        with self._lock:
            if name in self._known:
                return self._known[name][0]
        if self._store.address.has_listing:
            raise FileNotFoundError(f"{self.location}/{name}")
        return self._look(name)

    def _look(self, name: str) -> "StoredObject":
        with self._lock:
            found, at = self._known.get(name, (None, 0.0))
            if found is not None and clock.monotonic() - at < _LOOK_AGAIN_S:
                return found
        try:
            found = self._store.stat(self._path(name))
        except CorpusError as error:
            raise OSError(str(error)) from None
        with self._lock:
            self._known[name] = found, clock.monotonic()
        return found

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")


class _StoredFile(io.RawIOBase):
    """One version of an object as a file; each read is one request."""

    def __init__(self, store: "Store", name: str, found: "StoredObject") -> None:
        self._store, self._name, self._identity = store, name, found.identity
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._identity.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # any writable buffer
        stop = min(self._position + len(buffer), self._identity.size)
        number = stop - self._position
        if number <= 0:
            return 0
        try:
            content = self._store.get(self._name, self._position, stop, identity=self._identity)
        except CorpusError as error:
            raise OSError(str(error)) from None
        buffer[:number] = content
        self._position = stop
        return number


def _stamp(found: "StoredObject") -> FileStamp:
    return FileStamp(found.modified_s, found.identity.size, found.identity.tag)


def tokenizer_of(files: RunFiles) -> str:
    """Return the fingerprint of a run's tokenizer; "" if it has none, as with corpora of other tools."""
    try:
        size = files.stamp(TOKENIZER_FILE).size
        with files.open(TOKENIZER_FILE) as file:
            return hashlib.blake2b(file.read(size)).hexdigest()
    except OSError:
        return ""

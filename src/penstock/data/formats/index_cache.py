"""Index cache of foreign files: beside them, or else in the user's cache folder.

Files are written under a name of their own and renamed, so several processes may make the same one at
once: each writes it whole, and the last one stays.
"""

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.core.env import cache_folder
from penstock.core.files import commit
from penstock.storage.base import LocalStorage, Storage

FOLDER = ".penstock"
NO_PLACE = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,
    errno.ENOTDIR,
)
"""Errors of a folder that takes no files; a full disk is no such error."""


def index_folders(storage: Storage) -> tuple[Path, ...]:
    """Return the folders that may hold the index of a storage's files, in the order they are tried."""
    local = isinstance(storage, LocalStorage)
    place = str(Path(storage.location).resolve()) if local else storage.location
    cached = cache_folder() / "index" / hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
    return (Path(storage.location) / FOLDER, cached) if local else (cached,)


def kept(storage: Storage, name: str) -> Path | None:
    """Return the file that was kept under a name, or None."""
    paths = (folder / name for folder in index_folders(storage))
    return next((path for path in paths if path.is_file()), None)


def kept_like(storage: Storage, pattern: str) -> Iterator[Path]:
    """Yield the files that were kept under names of a pattern."""
    for folder in index_folders(storage):
        yield from sorted(folder.glob(pattern))


def keep(storage: Storage, name: str, write: Callable[[BinaryIO], object]) -> Path:
    """Write a file into the first folder that takes one, and return its path.

    Raises:
        OSError: no folder takes it, or the disk is full; nothing half-written is left.
    """
    *preferred, last = index_folders(storage)
    for folder in preferred:
        try:
            return _write(folder, name, write)
        except OSError as error:
            if error.errno not in NO_PLACE:
                raise
    return _write(last, name, write)


def _write(folder: Path, name: str, write: Callable[[BinaryIO], object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
    path = Path(temporary)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o644)  # others may read the data: they may read this
        commit(path, folder / name)
    except BaseException:  # Ctrl-C too must leave no unfinished file
        path.unlink(missing_ok=True)
        raise
    return folder / name

"""Durable files: a reader sees a complete file or folder, or none.

Everything is written beside its final name, flushed to disk, then renamed, so a kill at any time leaves the
old content or the new. Names that start with a dot and end in `.tmp` are leftovers of a killed writer and may
be deleted.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from penstock.core.clock import monotonic, sleep
from penstock.core.errors import RunLocked, UsageError

_ASKED_S = 10.0  # a process that asks may be suspended meanwhile


def temporary_beside(path: Path) -> Path:
    """Return the temporary name under which `path` is built before it is renamed."""
    return path.with_name(f".{path.name}.tmp")


def sync_directory(path: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file durably; an OSError (a full disk, for example) leaves the old one in place."""
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        commit(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def check_folder_of(path: Path, *, option: str) -> None:
    """Refuse an output file in a folder that does not exist, before the work begins.

    Raises:
        UsageError: the message names the option.
    """
    if not path.parent.is_dir():
        raise UsageError(f"The folder of {option} does not exist", got=str(path.parent), fix="Make it first.")


def write_json(path: Path, value: Any) -> None:  # Any: whatever json can write
    """Write JSON durably, keys in the given order, with a final newline."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def commit(temporary: Path, final: Path) -> None:
    """Rename a finished file or folder to its final name and flush the parent folder."""
    temporary.rename(final)
    sync_directory(final.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder; a reader that lists the parent never sees a part of it."""
    if path.exists():
        doomed = temporary_beside(path.with_name(f"{path.name}.removed"))
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def checksum(path: Path) -> str:
    """Return the BLAKE2b-256 of a file's bytes as hex, read in 1 MiB pieces."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def exclusive(folder: Path, *, purpose: str) -> Iterator[None]:
    """Lock a folder for one writer; the kernel releases the lock when the process ends.

    Waits up to 10 s for processes that are asking `is_locked`, which share the lock for a moment.

    Raises:
        RunLocked: another live process has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        deadline = monotonic() + _ASKED_S
        while not _locks(file, fcntl.LOCK_EX):
            if (is_written := is_locked(folder)) or monotonic() > deadline:
                file.seek(0)
                writer = file.read().strip() if is_written else ""
                raise RunLocked(
                    f"{folder} is being written by another process ({writer or 'unknown'})",
                    fix="Wait for it, stop it, or choose another folder.",
                )
            sleep(0.001)
        file.truncate(0)
        file.write(f"{purpose}, pid {os.getpid()}\n")
        file.flush()
        yield


def locked_at(folder: Path) -> int:
    """Return when a process last locked a folder by `exclusive`, in ns of its disk's clock; 0: none has.

    Unlike `is_locked`, this holds no lock itself, so that it can be asked while somebody is about to lock.
    """
    try:
        return (folder / ".lock").stat().st_mtime_ns
    except OSError:
        return 0


def is_locked(folder: Path) -> bool:
    """True if a process has locked a folder by `exclusive`, on any machine that shares it."""
    path = folder / ".lock"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return not _locks(file, fcntl.LOCK_SH)


def _locks(file: IO[Any], kind: int) -> bool:
    """Lock an open file if that is possible at once; return whether it was."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_lock(path: Path, *, waits: bool) -> BinaryIO | None:
    """Return a file that this process has locked until it is closed; None: another has, and `waits` is False.

    Whoever holds the lock may remove the file.
    """
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        except FileNotFoundError:  # it was removed in between
            pass
        except BlockingIOError:
            file.close()
            return None
        file.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager: wait for other processes, hold the lock of a file, and remove the file at the end."""
    lock = take_lock(path, waits=True)
    assert lock is not None
    try:
        yield
    finally:
        path.unlink()
        lock.close()


MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"

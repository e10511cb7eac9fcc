"""Check: speed and free space of the disk of the run's folder."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.core import clock
from penstock.core.units import mib
from penstock.doctor.checks.check import CheckOptions, Finding, green, red, yellow
from penstock.doctor.checks.proc_files import text_of

CHECK = "disk"

_BLOCK_BYTES = 2**22
_MAX_BYTES = 2**28
_MAX_S = 2.0
"""Seconds of writing; the file is then read once."""
_MIN_FREE, _LITTLE_FREE = 2**30, 20 * 2**30
_SLOW_BYTES_S = 100e6
_flush = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """Speed and free space of one folder's disk."""

    folder: str
    file_system: str
    free_bytes: int
    written_bytes_s: float
    """Bytes per second, flushed to the disk."""
    read_bytes_s: float
    """Bytes per second, bypassing the page cache if the system can drop it."""


def measure(options: CheckOptions) -> DiskFacts:
    """Write, read and delete a file; for a full disk, only the free space is measured."""
    folder = _existing(options.folder)
    free = shutil.disk_usage(folder).free
    written = read = 0.0
    if free > _MIN_FREE:
        with tempfile.TemporaryFile(dir=folder) as file:
            written = _write(file.fileno())
            read = _read(file.fileno())
    return DiskFacts(
        folder=str(folder),
        file_system=file_system_of(folder.resolve(), text_of(Path("/proc/self/mounts"))),
        free_bytes=free,
        written_bytes_s=written,
        read_bytes_s=read,
    )


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())


def _write(file: int) -> float:
    block, start, done = os.urandom(_BLOCK_BYTES), clock.monotonic(), 0
    while done < _MAX_BYTES and clock.monotonic() - start < _MAX_S:
        done += os.write(file, block)
        _flush(file)  # every block, so that a slow disk shows before the page cache is full
    return done / (clock.monotonic() - start)


def _read(file: int) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    start, done = clock.monotonic(), 0
    while found := len(os.read(file, _BLOCK_BYTES)):
        done += found
        if clock.monotonic() - start > _MAX_S:
            break
    return done / (clock.monotonic() - start)


def file_system_of(folder: Path, mounts: str) -> str:
    """Return the type of the file system of a folder, from the text of /proc/self/mounts.

    >>> file_system_of(Path("/data/run"), "/dev/sda / ext4 rw 0 0\\nnas:/x /data nfs4 rw 0 0")
    'nfs4'
    """
    rows = [line.split() for line in mounts.splitlines()]
    on = [(len(row[1]), row[2]) for row in rows if len(row) > 2 and folder.is_relative_to(row[1])]
    return max(on, default=(0, "unknown"))[1]


def judge(facts: DiskFacts) -> Iterator[Finding]:
    """Judge whether checkpoints fit, and how long they take."""
    if facts.free_bytes <= _MIN_FREE:
        yield red(
            f"{facts.folder} has {mib(facts.free_bytes)} free",
            remedy="Free some space, or set run.dir to another disk.",
        )
        return
    yield green(
        f"{facts.folder} ({facts.file_system}): writes {mib(facts.written_bytes_s)}/s, "
        f"reads {mib(facts.read_bytes_s)}/s, {mib(facts.free_bytes)} free"
    )
    if facts.free_bytes < _LITTLE_FREE:
        yield yellow(
            f"{facts.folder} has {mib(facts.free_bytes)} free, less than two checkpoints of a model of 1B",
            remedy="Free some space, or keep fewer checkpoints: checkpoint.keep.",
        )
    if facts.file_system in _IN_MEMORY:
        yield yellow(
            f"{facts.folder} lies in memory ({facts.file_system}): it does not outlive the machine",
            remedy="Set run.dir to a disk.",
        )
    if facts.written_bytes_s < _SLOW_BYTES_S:
        yield yellow(
            f"{facts.folder} takes {mib(facts.written_bytes_s)}/s: a checkpoint of a model of 1B takes "
            f"{12e9 / max(facts.written_bytes_s, 1):.0f} s",
            remedy="Set run.dir to a faster disk; training continues while a save fits in memory.",
        )

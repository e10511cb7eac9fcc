"""Local checkpoint storage: folders built beside their final names, flushed, renamed; no torch."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.checkpoint.layout import INDEX_FILE, step_of
from penstock.core.files import commit, remove_tree, sync_directory, temporary_beside, write_atomic

_ASIDE = "aside-"
_WRITE_BYTES = 2**26  # Linux truncates a write of more than 2 GiB


class LocalPlace:
    """Folder for checkpoints, on a disk shared by all ranks if they are on several machines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def url_of(self, name: str) -> str:
        """Return its path."""
        return str(self._folder / name)

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, in no order."""
        return [path.name for path in self._entries() if (path / INDEX_FILE).is_file() and _is_final(path)]

    def leftovers(self) -> list[str]:
        """Return the names of folders that were never committed."""
        return [path.name for path in self._entries() if path.name.startswith(".") and path.suffix == ".tmp"]

    def write(self, name: str, file: str, parts: Sequence[memoryview]) -> None:
        """Write one file of an uncommitted checkpoint and flush it to disk."""
        temporary = temporary_beside(self._folder / name)
        temporary.mkdir(parents=True, exist_ok=True)
        with (temporary / file).open("wb", buffering=0) as out:
            for part in parts:
                written = 0
                while written < len(part):
                    written += out.write(part[written : written + _WRITE_BYTES])
            os.fsync(out.fileno())

    def commit(self, name: str, index: bytes) -> None:
        """Rename a written folder to its final name."""
        final = self._folder / name
        temporary = temporary_beside(final)
        write_atomic(temporary / INDEX_FILE, index)
        sync_directory(temporary)
        remove_tree(final)
        commit(temporary, final)

    def abandon(self, name: str) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(temporary_beside(self._folder / name), ignore_errors=True)

    def remove(self, name: str) -> None:
        """Remove a folder."""
        remove_tree(self._folder / name)

    def set_aside(self, name: str) -> None:
        """Rename a folder so that it no longer counts as a checkpoint."""
        aside = self._folder / f"{_ASIDE}{name}"
        remove_tree(aside)
        commit(self._folder / name, aside)

    def size(self, name: str, file: str) -> int:
        """Return the size of a file in bytes."""
        return (self._folder / name / file).stat().st_size

    def read(self, name: str, file: str, start: int, stop: int) -> memoryview:
        """Return bytes of a file; read, not mapped: truncating a mapped file kills its reader."""
        content = np.empty(max(0, stop - start), np.uint8).data
        filled = 0
        with (self._folder / name / file).open("rb", buffering=0) as opened:
            opened.seek(start)
            while filled < len(content) and (got := opened.readinto(content[filled:])):
                filled += got
        return content[:filled]

    def _entries(self) -> list[Path]:
        return list(self._folder.iterdir()) if self._folder.is_dir() else []


def _is_final(path: Path) -> bool:
    return step_of(path.name) is not None

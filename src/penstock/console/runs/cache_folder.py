"""Folder of what was parsed of a run: in the user's cache, where one process at a time writes it."""

import shutil
import tempfile
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.core.files import take_lock

_LOCK = "lock"


def unwritable(error: OSError) -> PenstockError:
    """Return the error of a cache folder that cannot be written."""
    return PenstockError(
        "The console cannot write what it has parsed of a run",
        got=str(error),
        fix="Make room on that disk, or set PENSTOCK_CACHE to a folder on another one.",
    )


class CacheFolder:
    """Folder that this process alone writes: the given one, or a temporary one if another has that.

    Raises:
        PenstockError: it cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = take_lock(folder / _LOCK, waits=False)
        except OSError as error:
            raise unwritable(error) from None
        self._own = None if self._held else tempfile.TemporaryDirectory(prefix="penstock-console-")
        self.path = folder if self._own is None else Path(self._own.name)

    def empty(self) -> None:
        """Delete what is in it, or make it again where somebody has deleted it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.iterdir():
            if path.name == _LOCK:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process use it."""
        if self._held is not None:
            self._held.close()
        if self._own is not None:
            self._own.cleanup()

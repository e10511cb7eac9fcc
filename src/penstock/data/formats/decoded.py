"""Cache of decoded shards: unnamed temporary files, least recently used first out.

They are memory maps of unlinked files: they cost disk and page cache, which the kernel reclaims when it needs
memory, and vanish with the process however it ends. Thread-safe; two threads that request the same key decode
it once. After a fork the child begins with its parent's entries. Look-ups take no lock: single calls of an
ordered dict are atomic.
"""

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar

import numpy as np

from penstock.core import env
from penstock.core.arrays import Bytes
from penstock.core.errors import CorpusError
from penstock.storage.mapped import map_file
from penstock.storage.options import cache_bytes

T = TypeVar("T")

_MAX_BYTES = 16 * 2**30
"""Default disk space for decoded data of one process, unless PENSTOCK_CACHE_BYTES is set."""


class Decoded:
    """Cache of decoded values by key.

    Args:
        folder: folder of the files; None: the cache folder, see core/env.py.
        max_bytes: capacity; the last value decoded is kept even if it is larger.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int | None = None) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        # Any: each key's thing is of the type that its caller makes of the bytes
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self.free_locks()

    def free_locks(self) -> None:
        """Forget the locks after a fork: the threads that held them do not exist in the child."""
        self._lock = Lock()
        self._turns: dict[Hashable, Lock] = {}

    def get(self, key: Hashable, write: Callable[[BinaryIO], None], view: Callable[[Bytes], T]) -> T:
        """Return the cached value of a key, or else `view` of the bytes written by `write`.

        Raises:
            CorpusError: there is not enough disk space.
        """
        if (held := self._lookup(key)) is None:
            with self._lock:
                turn = self._turns.setdefault(key, Lock())
            with turn:
                if (held := self._lookup(key)) is None:
                    held = self._made(key, write, view)
        thing: T = held[0]
        return thing

    def _lookup(self, key: Hashable) -> tuple[Any, int] | None:  # Any: the caller's
        held = self._held.get(key)
        if held is not None:
            try:  # noqa: SIM105 - on the way of every slice, where `suppress` is half the cost
                self._held.move_to_end(key)
            except KeyError:  # another thread has just dropped it
                pass
        return held

    def _made(
        self, key: Hashable, write: Callable[[BinaryIO], None], view: Callable[[Bytes], Any]
    ) -> tuple[Any, int]:  # Any: the caller's
        try:
            content = self._make(write)
            held = view(content), len(content)
            most = self._max_bytes or cache_bytes() or _MAX_BYTES
            with self._lock:
                self._bytes += held[1] - self._held.pop(key, (None, 0))[1]
                self._held[key] = held
                while self._bytes > most and len(self._held) > 1:
                    self._bytes -= self._held.popitem(last=False)[1][1]
            return held
        finally:
            with self._lock:
                self._turns.pop(key, None)

    def _make(self, write: Callable[[BinaryIO], None]) -> Bytes:
        folder = self._folder or env.cache_folder() / "decoded"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    write(file)
                if not Path(name).stat().st_size:
                    return np.zeros(0, np.uint8)
                return map_file(Path(name))
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise CorpusError(
                f"There is no disk space for decoded data in {folder}: {error}",
                fix="Make room, or set PENSTOCK_CACHE to a folder on a larger disk.",
            ) from None


DECODED = Decoded()
"""Cache of this process, shared by all corpora so that the bound holds for all."""

os.register_at_fork(after_in_child=DECODED.free_locks)

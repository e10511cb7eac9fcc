"""What was decoded from compressed files: kept in nameless files, the longest unused dropped first.

Memory maps of files that have no name any more: they cost disk and page cache, which the kernel takes back
when it needs memory, and vanish with the process however it ends. Safe for threads; two that ask
for the same thing decode it once. After a fork the child begins with what its parent held.
What is held is found without a lock: single calls of an ordered dict are atomic.
"""

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core import env
from penstock.core.errors import CorpusError

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

_MAX_BYTES = 16 * 2**30
"""Disk for decoded data of one process, where PENSTOCK_CACHE_BYTES says nothing."""


class Decoded:
    """Decoded things by key.

    Args:
        folder: where the files are made; None: in the cache folder, see core/env.py.
        max_bytes: of all that is held; the last thing decoded is held even if it is larger.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int | None = None) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        # Any: each key's thing is of the type that its caller makes of the bytes
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self.free_locks()

    def free_locks(self) -> None:
        """Forget who is at work; for a child after a fork, where the threads that were are not."""
        self._lock = Lock()
        self._turns: dict[Hashable, Lock] = {}

    def get(self, key: Hashable, write: Callable[[BinaryIO], None], view: Callable[[Bytes], T]) -> T:
        """Return what is held under a key; if there is nothing, `view` of the bytes that `write` writes.

        Raises:
            CorpusError: there is no place for it.
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
            most = self._max_bytes or env.cache_bytes() or _MAX_BYTES
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
                if not (size := Path(name).stat().st_size):
                    return np.zeros(0, np.uint8)
                # pyarrow's map outlives its descriptor: a thousand of them must not use a thousand up
                with pa.memory_map(name) as mapped:
                    return np.frombuffer(mapped.read_buffer(size), np.uint8)
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise CorpusError(
                f"There is no place for decoded data in {folder}: {error}",
                fix="Make room, or set PENSTOCK_CACHE to a folder on a larger disk.",
            ) from None


DECODED = Decoded()
"""Of this process; one for all corpora, so that the bound is one."""

os.register_at_fork(after_in_child=DECODED.free_locks)

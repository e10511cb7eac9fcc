"""What was decoded from compressed files: kept in nameless files, the longest unused dropped first.

Memory maps of files that have no name any more: they cost disk and page cache, which the kernel takes back
when it needs memory, and vanish with the process however it ends. Safe for threads; two that ask
for the same thing decode it once. After a fork the child begins with what its parent held.
"""

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core import env
from penstock.core.errors import CorpusError

Bytes = npt.NDArray[np.uint8]

_MAX_BYTES = 16 * 2**30
"""Disk for decoded data of one process, where PENSTOCK_CACHE_BYTES says nothing."""


class Decoded:
    """Decoded bytes by key.

    Args:
        folder: where the files are made; None: in the cache folder, see core/env.py.
        max_bytes: of all that is held; the last thing decoded is held even if it is larger.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int | None = None) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._held: OrderedDict[Hashable, Bytes] = OrderedDict()
        self._bytes = 0
        self._free()
        os.register_at_fork(after_in_child=self._free)  # a lock may be held by a thread that is not there

    def _free(self) -> None:
        self._lock = Lock()
        self._turns: dict[Hashable, Lock] = {}

    def get(self, key: Hashable, write: Callable[[BinaryIO], None]) -> Bytes:
        """Return what is held under a key; `write` makes it if there is nothing.

        Raises:
            CorpusError: there is no place for it.
        """
        with self._lock:
            if (held := self._lookup(key)) is not None:
                return held
            turn = self._turns.setdefault(key, Lock())
        with turn:
            with self._lock:
                if (held := self._lookup(key)) is not None:
                    return held
            try:
                made = self._make(write)
                self._keep(key, made)
            finally:
                with self._lock:
                    self._turns.pop(key, None)
            return made

    def _lookup(self, key: Hashable) -> Bytes | None:
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
        return held

    def _keep(self, key: Hashable, made: Bytes) -> None:
        most = self._max_bytes or env.cache_bytes() or _MAX_BYTES
        with self._lock:
            self._held[key] = made
            self._bytes += len(made)
            while self._bytes > most and len(self._held) > 1:
                self._bytes -= len(self._held.popitem(last=False)[1])

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

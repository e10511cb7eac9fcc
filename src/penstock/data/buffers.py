"""Batch memory that comes back by itself, so that a stream of batches touches no new pages.

A fresh megabyte costs more in page faults than in filling it, and the allocator gives large blocks
back to the system as soon as a batch is dropped. So buffers are kept, and one is handed out again
once nothing but this pool refers to it: an array, a view of it, or a tensor made from either, keeps
its buffer alive and out of reach. That reads CPython's reference counts, under its global lock.
"""

import sys
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

_KEPT = 32  # of each size: five fields of a batch in use and five batches ahead


def _references_to_free() -> int:
    """Count the references `take` sees to a free buffer: how many a loop adds differs between Pythons."""
    for buffer in [np.empty(0, dtype=np.uint8)]:
        count = sys.getrefcount(buffer)
    return count


_FREE = _references_to_free()


class Buffers:
    """Recycled memory for arrays of a few sizes. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._lock = Lock()

    def take(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:  # Any: of the dtype asked for
        """Return an array [count] that nobody else refers to; its contents are arbitrary."""
        size = count * np.dtype(dtype).itemsize
        with self._lock:
            kept = self._kept.setdefault(size, [])
            for buffer in kept:
                if sys.getrefcount(buffer) == _FREE:
                    return buffer.view(dtype)
            buffer = np.empty(size, dtype=np.uint8)
            if len(kept) < _KEPT:
                kept.append(buffer)
            return buffer.view(dtype)

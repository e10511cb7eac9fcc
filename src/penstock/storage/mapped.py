"""Memory maps of files without an open descriptor.

Python's `mmap`, and so numpy's, keeps a copy of the descriptor while the map lives (before Python 3.13); a
corpus may have more shards than a process may have open files.
"""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Return the bytes of a file, read-only; the map lives as long as any array over it.

    The file may be unlinked or renamed meanwhile. Reading beyond the end of a file truncated since raises
    SIGBUS.

    Raises:
        OSError: it is missing, empty, or cannot be mapped.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return np.asarray(_Map(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


class _Map:
    """Owner of one mapping; numpy reads `__array_interface__` and keeps this object as the array's `base`."""

    def __init__(self, descriptor: int, size: int) -> None:
        address = _C.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
        self._place = address, size
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True)}

    def __del__(self, munmap=_C.munmap) -> None:  # type: ignore[no-untyped-def] # bound: gone when Python ends
        if place := getattr(self, "_place", None):
            munmap(*place)

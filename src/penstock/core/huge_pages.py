"""Memory in pages of 2 MiB where Linux grants them (transparent huge pages), else plain memory."""

import mmap
import threading
import weakref

_PAGE = 2**12
_SHARED = 2**26
"""Bytes of a map that small pieces share: a matrix of a small model is no larger than a huge page or two, and
what lies before the first or behind the last whole one of a map is in small pages."""

_lock = threading.Lock()
_shared: weakref.ref[mmap.mmap] | None = None
_used = 0


def reserve(num_bytes: int) -> mmap.mmap | memoryview:
    """Return zeroed memory of this process; it is given back when nothing refers to it any more.

    Small pieces are given back together with those reserved around the same time. Pages are taken when they
    are first written.
    """
    if num_bytes >= _SHARED // 4:
        return _map(num_bytes)
    global _shared, _used
    with _lock:
        shared = None if _shared is None else _shared()
        if shared is None or _used + num_bytes > _SHARED:
            shared, _used = _map(_SHARED), 0
            _shared = weakref.ref(shared)
        first, _used = _used, _used + -(-max(1, num_bytes) // _PAGE) * _PAGE
        return memoryview(shared)[first : first + max(1, num_bytes)]


def _map(num_bytes: int) -> mmap.mmap:
    # private: shared memory, which is what Python maps otherwise, gets no huge pages unless Linux is told to
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            return memory
    return memory

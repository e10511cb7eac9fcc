"""Memory in 2 MiB pages if Linux grants them (transparent huge pages), else ordinary memory."""

import mmap
import threading
import weakref

_PAGE = 2**12
_SHARED = 2**26
"""Size of the map that small allocations share: a matrix of a small model fills only a huge page or two, and
the parts of a map before the first and after the last aligned huge page use small pages."""

_lock = threading.Lock()
_shared: weakref.ref[mmap.mmap] | None = None
_used = 0


def reserve(num_bytes: int) -> mmap.mmap | memoryview:
    """Return zeroed memory; it is freed when nothing refers to it any more.

    Small allocations are freed together with those made around the same time. Pages are allocated on first
    write.
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
    # MAP_PRIVATE: Python's default, shared memory, gets no huge pages unless Linux is configured for it
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            return memory
    return memory

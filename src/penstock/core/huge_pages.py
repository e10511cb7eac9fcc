"""Memory in pages of 2 MiB where Linux grants them (transparent huge pages), else plain memory."""

import mmap


def reserve(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory of this process; it is given back when nothing refers to it any more.

    Pages are taken when they are first written. Private, because Linux grants shared memory, which is what
    Python maps otherwise, no huge pages unless it was set up to.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= 2**21 and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            return memory
    return memory

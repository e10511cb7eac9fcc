"""Chunk size of attention with a softcap, in queries; no torch, for the memory planner."""

QUERIES = 128
"""Queries whose scores exist at once (nn/kernels/softcap.py)."""


def chunk_bytes(*, heads: int, keys: int) -> int:
    """Return the peak bytes of a chunk's scores in the backward pass: three float32 numbers of each.

    Args:
        heads: query heads of a rank.
        keys: keys of a query, at most.

    >>> chunk_bytes(heads=8, keys=8192) // 2**20
    96
    """
    return 3 * 4 * QUERIES * heads * keys

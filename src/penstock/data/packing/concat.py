"""Packing rule `concat`: join the fragments in order and cut every L tokens.

The simplest rule; it splits the most documents, about one per row.
"""

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.types import Pieces


def pack(lengths: Int64, *, num_rows: int, sequence_length: int) -> Pieces:
    """Cut the joined fragments into rows.

    Args:
        lengths: [n] int64 fragment lengths, each at least 1.
        num_rows: ceil(sum of lengths / sequence_length).
    """
    ends = np.cumsum(lengths)
    edges = np.arange(1, num_rows) * sequence_length  # between rows
    # Fragment that ends or is cut at each edge: the number of fragments that end before it (faster than a
    # search).
    at = np.cumsum(np.bincount(ends // sequence_length, minlength=num_rows))[: num_rows - 1]
    inside = edges < ends[at]
    cut, cut_edges = at[inside], edges[inside]
    after = cut + np.arange(1, len(cut) + 1)  # piece that begins at each cut

    cuts_before = np.zeros(len(ends) + len(cut), dtype=np.int64)
    cuts_before[after] = 1
    np.cumsum(cuts_before, out=cuts_before)
    fragment = np.arange(len(cuts_before)) - cuts_before
    stop = ends[fragment]
    stop[after - 1] = cut_edges
    length = stop.copy()
    length[1:] -= stop[:-1]
    offset = np.zeros_like(stop)  # 0 except after a cut
    offset[after] = cut_edges - (ends - lengths)[cut]
    row_ends = at + np.cumsum(inside) + ~inside
    return Pieces(fragment, offset, length, np.append(row_ends, len(stop)))

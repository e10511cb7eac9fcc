"""`concat`: join the fragments in order and cut every L tokens.

The simplest rule, and the one that splits the most documents: about one per row.
"""

import numpy as np

from penstock.data.types import Int64, Pieces


def pack(lengths: Int64, *, num_rows: int, sequence_length: int) -> Pieces:
    """Cut the joined fragments into rows.

    Args:
        lengths: [n] int64 fragment lengths, each at least 1.
        num_rows: ceil(sum of lengths / sequence_length).
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    first_row, last_row = starts // sequence_length, (ends - 1) // sequence_length
    counts = last_row - first_row + 1  # rows that a fragment has a piece in
    pieces_before = np.cumsum(counts) - counts
    fragment = np.repeat(np.arange(len(lengths)), counts)
    row = np.arange(len(fragment)) + np.repeat(first_row - pieces_before, counts)
    offset = np.maximum(row * sequence_length - starts[fragment], 0)
    past = np.minimum((row + 1) * sequence_length, ends[fragment]) - starts[fragment]
    return Pieces(fragment, offset, past - offset, np.cumsum(np.bincount(row, minlength=num_rows)))

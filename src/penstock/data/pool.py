"""One packed pool: the documents of 16 blocks, shuffled and placed into rows."""

from dataclasses import dataclass

import numpy as np

from penstock.core.rng import shuffled
from penstock.data.holdout import TokenSpace
from penstock.data.order import Order
from penstock.data.packing import PACKERS
from penstock.data.types import Int64

PADDING = -1
"""In place of a shard's index: a piece that is read from nowhere."""


@dataclass(frozen=True, slots=True)
class PackedPool:
    """Where every row of a pool is; 32 bytes a piece, half a megabyte for 16 million tokens."""

    pieces: Int64
    """[p, 4]: shard (or PADDING), first token and past-the-last token in it, whether the document goes
    on after the piece. The pieces of a row are adjacent and hold L tokens."""
    firsts: memoryview
    """First piece of each row, rows in the order of training; a view of int64, which is quicker to index
    than an array."""
    pasts: memoryview
    """Past-the-last piece of each row."""


def pack_pool(space: TokenSpace, order: Order, *, epoch: int, pool: int, rule: str) -> PackedPool:
    """Open a pool: find its fragments, shuffle them, pack them, shuffle the rows.

    Args:
        rule: packing rule, a name in PACKERS.
    """
    length, num_rows = order.geometry.sequence_length, order.rows_in_pool(pool)
    found = space.fragments(order.pool_ranges(epoch, pool))
    mix = shuffled(len(found), order.key("documents", epoch, pool))
    starts, lengths, continued = found.starts[mix], found.lengths[mix], found.continued[mix]
    packed = PACKERS[rule](lengths, num_rows=num_rows, sequence_length=length)

    cut_inside = packed.offset + packed.length < lengths[packed.fragment]
    shard, start = space.corpus.locate(starts[packed.fragment] + packed.offset)
    goes_on = cut_inside | continued[packed.fragment]
    pieces = np.stack((shard, start, start + packed.length, goes_on), axis=1)
    row_ends = packed.row_ends
    if short := num_rows * length - int(lengths.sum()):
        pieces = np.concatenate((pieces, np.array([[PADDING, 0, short, 0]])))
        row_ends = np.append(row_ends[:-1], len(pieces))
    # Rows are shuffled, so that the pieces of one long document do not arrive in a run; the last row
    # stays last, because it is the one that may be padded.
    rows = np.append(shuffled(num_rows - 1, order.key("rows", epoch, pool)), num_rows - 1)
    row_starts = np.concatenate((np.zeros(1, dtype=np.int64), row_ends[:-1]))
    return PackedPool(pieces, memoryview(row_starts[rows]), memoryview(row_ends[rows]))

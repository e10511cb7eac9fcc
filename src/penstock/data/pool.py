"""One packed pool: the documents of 16 blocks, shuffled and placed into rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.rng import shuffled
from penstock.data.holdout import TokenSpace
from penstock.data.order import Cut, Order
from penstock.data.packing import PACKERS
from penstock.data.types import Fragments, Table

PADDING = -1
"""In place of a shard's index: a piece that is read from nowhere."""


@dataclass(frozen=True, slots=True)
class PackedPool:
    """Where every row of a pool is; 16 bytes a piece, a third of a megabyte for 16 million tokens."""

    pieces: Table
    """[p, 4]: shard (or PADDING), first token and past-the-last token in it, whether the document goes
    on after the piece. The pieces of a row are adjacent and hold L tokens. In 32 bits where they fit: fresh
    memory costs more than to fill it."""
    firsts: memoryview
    """First piece of each row, rows in the order of training; a view of integers, which is quicker to index
    than an array."""
    pasts: memoryview
    """Past-the-last piece of each row."""

    def rows_with(self, shard: int, start: int, stop: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the rows that hold some of a shard's tokens [start, stop), each with which of them."""
        low = np.maximum(self.pieces[:, 1], np.int64(start))
        high = np.minimum(self.pieces[:, 2], np.int64(stop))
        found = np.flatnonzero((self.pieces[:, 0] == shard) & (low < high))
        by_first = np.argsort(self.firsts)
        rows = by_first[np.searchsorted(np.asarray(self.firsts)[by_first], found, side="right") - 1]
        for row, piece in zip(rows.tolist(), found.tolist(), strict=True):
            yield row, (int(low[piece]), int(high[piece]))


def pack_pool(
    space: TokenSpace, order: Order, *, epoch: int, pool: int, rule: str, cuts: Sequence[Cut] = ()
) -> PackedPool:
    """Open a pool: find its fragments, shuffle them, pack them, shuffle the rows.

    Args:
        rule: packing rule, a name in PACKERS.
        cuts: changes of the sequence length since the pool was begun. What one leaves over is joined
            where it lies in one piece, shuffled and packed again at the next length: every token once.
    """
    if cuts:
        *earlier, cut = cuts
        longer = order.at_length(cut.sequence_length)
        packed = pack_pool(space, longer, epoch=epoch, pool=pool, rule=rule, cuts=earlier)
        found = _left_over(packed, space, after=cut.rows)
    else:
        found = space.fragments(order.blocks.of_pool(epoch, pool))
    keys = [
        order.key(purpose, epoch, pool, *([len(cuts)] if cuts else [])) for purpose in ("documents", "rows")
    ]
    return _pack(found, space, length=order.geometry.sequence_length, rule=rule, keys=keys)


def _pack(found: Fragments, space: TokenSpace, *, length: int, rule: str, keys: Sequence[int]) -> PackedPool:
    mix = shuffled(len(found), keys[0])
    lengths = found.lengths[mix]
    num_tokens = int(lengths.sum())
    num_rows = -(-num_tokens // length)
    packed = PACKERS[rule](lengths, num_rows=num_rows, sequence_length=length)

    of = mix[packed.fragment]
    in_shard = found.starts - space.corpus.starts[found.shards]
    ends = in_shard + found.lengths + found.continued  # no piece comes to the end of what is continued
    start = in_shard[of] + packed.offset
    past = start + packed.length
    pieces = np.empty((len(of), 4), dtype=np.int32 if past.max(initial=0) < 2**31 else np.int64)
    pieces[:, 0], pieces[:, 1], pieces[:, 2] = found.shards[of], start, past
    pieces[:, 3] = past < ends[of]
    row_ends = packed.row_ends
    if short := num_rows * length - num_tokens:
        pieces = np.concatenate((pieces, np.array([[PADDING, 0, short, 0]], dtype=pieces.dtype)))
        row_ends = np.append(row_ends[:-1], len(pieces))
    # Rows are shuffled, so that the pieces of one long document do not arrive in a run; the last row
    # stays last, because it is the one that may be padded.
    rows = np.append(shuffled(num_rows - 1, keys[1]), num_rows - 1)
    row_starts = np.concatenate((np.zeros(1, dtype=np.int64), row_ends[:-1]))
    firsts, pasts = row_starts[rows].astype(np.int32), row_ends[rows].astype(np.int32)
    return PackedPool(pieces, memoryview(firsts), memoryview(pasts))


def _left_over(packed: PackedPool, space: TokenSpace, *, after: int) -> Fragments:
    """Return what the rows from `after` on hold, in corpus order, as few fragments as possible."""
    spans = zip(packed.firsts[after:], packed.pasts[after:], strict=True)
    pieces = np.concatenate([packed.pieces[first:past] for first, past in spans])
    shard, start, stop, goes_on = pieces[pieces[:, 0] != PADDING].T
    starts = space.corpus.starts[shard] + start
    order = np.argsort(starts)
    starts, lengths, continued = starts[order], (stop - start)[order], goes_on[order].astype(np.bool_)
    joined = continued[:-1] & (starts[:-1] + lengths[:-1] == starts[1:])
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    last = np.append(first[1:], len(starts)) - 1
    return Fragments(shard[order][first], starts[first], np.add.reduceat(lengths, first), continued[last])

"""Pools whose documents are never split: rows are padded, and how many there are is counted.

A document belongs to the pool in whose blocks it starts, and is read beyond them if it is longer. How
many rows a pool's documents need is known only once they are packed, so all pools are packed once, when the
order is first asked for: a table of a row per pool, after which sample k is a search in its running sum. The
blocks of a pool are the same in every epoch and the count does not depend on the order of documents, so the
table serves all epochs; documents and rows are shuffled anew in each (docs/adr/0012).

A document longer than a row is truncated or dropped, as the user chose. After a change of the sequence length
all documents that no row has held yet are packed again, so one that was too long may fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.rng import shuffled
from penstock.data.corpus import Corpus
from penstock.data.holdout import TokenSpace
from penstock.data.order import Cut, Order
from penstock.data.packing import PACKERS
from penstock.data.pool import PADDING, PackedPool
from penstock.data.types import Fragments, Int64, Waste


@dataclass(frozen=True, slots=True)
class Counted:
    """What packing made of every pool; all arrays are [pools] int64."""

    rows: Int64
    tokens: Int64
    """Tokens in those rows; the rest of them is padding."""
    left_out: Int64
    """Tokens that were truncated or dropped."""
    documents: Int64
    """Documents that were truncated or dropped."""


# Counting takes about a second a billion tokens, and every change of a run makes new orders.
_PACKED = 128  # pools kept: those that lanes are in, and some of before a change
_known: WeakKeyDictionary[Corpus, dict[tuple[str, str, int], Counted]] = WeakKeyDictionary()


class WholePools:
    """The pools of a token space under the rule `whole`.

    Args:
        overlong: "truncate" or "drop".
    """

    def __init__(self, space: TokenSpace, overlong: str) -> None:
        self._space = space
        self._overlong = overlong
        self._packed: dict[tuple[str, int, int, tuple[Cut, ...]], PackedPool] = {}
        self._lock = Lock()

    def counted(self, order: Order) -> Counted:
        """Return what packing makes of every pool, in any epoch."""
        known = _known.setdefault(self._space.corpus, {})
        key = (order.identity, self._overlong, self._space.key)
        if key not in known:
            known[key] = self._count(order)
        return known[key]

    def rows(self, order: Order) -> Int64:
        """Return the rows of every pool, in any epoch.

        Raises:
            ConfigError: there are none at all.
        """
        rows = self.counted(order).rows
        if not rows.any():
            raise ConfigError(
                f"No document of corpus {order.name!r} fits a row of {order.geometry.sequence_length} tokens",
                fix="Take longer rows, or overlong='truncate'.",
            )
        return rows

    def rows_left(self, order: Order, epoch: int, pool: int, cuts: Sequence[Cut]) -> int:
        """Return the rows that the documents make that no row of a pool has held yet."""
        return len(self.pack(order, epoch=epoch, pool=pool, cuts=cuts).firsts)

    def waste(self, order: Order, pools: int) -> Waste:
        """Return what so many first pools waste, in any epoch."""
        counted, length = self.counted(order), order.geometry.sequence_length
        rows, tokens = int(counted.rows[:pools].sum()), int(counted.tokens[:pools].sum())
        left_out, documents = int(counted.left_out[:pools].sum()), int(counted.documents[:pools].sum())
        return Waste(rows * length - tokens, left_out, documents)

    def waste_in(self, order: Order, epoch: int, pool: int, rows: int, cuts: Sequence[Cut]) -> Waste:
        """Return what the first rows of a pool waste, less what was counted before the last cut.

        What is left out is counted when a pool's last row is served. If its length then changes, and what
        was too long has rows after all, that is taken back.
        """
        if not rows and not cuts and self.counted(order).rows[pool]:
            return Waste()  # not begun: there is no need to pack it
        packed = self.pack(order, epoch=epoch, pool=pool, cuts=cuts)
        last = packed.pieces[np.asarray(packed.pasts)[:rows] - 1]  # where a row's padding is
        padding = last[last[:, 0] == PADDING, 2].sum()
        wasted = self._left_out(order, epoch, pool, rows, cuts) + Waste(padding=int(padding))
        if not cuts:
            return wasted
        *earlier, cut = cuts
        before = order.at_length(cut.sequence_length)
        return wasted - self._left_out(before, epoch, pool, cut.rows, earlier)

    def _left_out(self, order: Order, epoch: int, pool: int, rows: int, cuts: Sequence[Cut]) -> Waste:
        """Return what of a pool has no row for good, if all rows of its last packing were served."""
        if rows < self.rows_left(order, epoch, pool, cuts):
            return Waste()
        found = self._space.documents(order.blocks.of_pool(epoch, pool))
        done = [*cuts, Cut(order.geometry.sequence_length, rows)]
        held = [self._held(order, epoch, pool, done[: number + 1]) for number in range(len(done))]
        starts, lengths = (np.concatenate(of) for of in zip(*held, strict=True))
        missing, by_start = found.lengths.copy(), np.argsort(found.starts)
        missing[by_start[np.searchsorted(found.starts, starts, sorter=by_start)]] -= lengths
        return Waste(left_out=int(missing.sum()), documents=int(np.count_nonzero(missing)))

    def _held(self, order: Order, epoch: int, pool: int, cuts: Sequence[Cut]) -> tuple[Int64, Int64]:
        """Return the starts and lengths of the documents in the rows between the last two cuts."""
        *earlier, cut = cuts
        packed = self.pack(order.at_length(cut.sequence_length), epoch=epoch, pool=pool, cuts=earlier)
        spans = zip(packed.firsts[: cut.rows], packed.pasts[: cut.rows], strict=True)
        held = np.concatenate([packed.pieces[:0], *(packed.pieces[first:past] for first, past in spans)])
        held = held[held[:, 0] != PADDING]
        return self._space.corpus.starts[held[:, 0]] + held[:, 1], held[:, 2] - held[:, 1]

    def pack(self, order: Order, *, epoch: int, pool: int, cuts: Sequence[Cut] = ()) -> PackedPool:
        """Open a pool: find its documents, shuffle them, pack them, shuffle the rows.

        Args:
            cuts: changes of the sequence length since the pool was begun.
        """
        key = (order.identity, epoch, pool, tuple(cuts))
        packed = self._packed.get(key)
        if packed is None:
            packed = self._pack(order, epoch, pool, cuts)
            with self._lock:
                self._packed[key] = packed
                while len(self._packed) > _PACKED:
                    self._packed.pop(next(iter(self._packed)))
        return packed

    def _pack(self, order: Order, epoch: int, pool: int, cuts: Sequence[Cut]) -> PackedPool:
        length = order.geometry.sequence_length
        found = self.documents(order, epoch=epoch, pool=pool, cuts=cuts)
        keys = [order.key(purpose, epoch, pool, *_nonzero(len(cuts))) for purpose in ("documents", "rows")]
        found = self._kept(found.take(shuffled(len(found), keys[0])), length)
        packed = PACKERS["whole"](
            np.minimum(found.lengths, length), num_rows=len(found), sequence_length=length
        )
        of = found.take(packed.fragment)
        in_shard = of.starts - self._space.corpus.starts[of.shards]
        goes_on = packed.length < of.lengths
        pieces = np.stack((of.shards, in_shard, in_shard + packed.length, goes_on), axis=1)
        firsts = np.concatenate((np.zeros(1, dtype=np.int64), packed.row_ends[:-1]))
        pieces, firsts, ends = _padded(pieces, firsts[: len(packed.row_ends)], packed.row_ends, length)
        rows = shuffled(len(ends), keys[1])
        return PackedPool(pieces, firsts[rows].data, ends[rows].data)

    def documents(self, order: Order, *, epoch: int, pool: int, cuts: Sequence[Cut] = ()) -> Fragments:
        """Return the documents of a pool that no row has held before the last cut."""
        found = self._space.documents(order.blocks.of_pool(epoch, pool))
        for number in range(len(cuts)):
            starts, _ = self._held(order, epoch, pool, cuts[: number + 1])
            found = found.take(np.flatnonzero(~np.isin(found.starts, starts)))
        return found

    def _kept(self, found: Fragments, length: int) -> Fragments:
        if self._overlong == "truncate":
            return found
        return found.take(np.flatnonzero(found.lengths <= length))

    def _count(self, order: Order) -> Counted:
        length = order.geometry.sequence_length
        table = np.zeros((order.num_pools, 4), dtype=np.int64)
        for pool in range(order.num_pools):
            found = self._space.documents(order.blocks.of_pool(0, pool))
            lengths = np.minimum(self._kept(found, length).lengths, length)
            packed = PACKERS["whole"](lengths, num_rows=len(lengths), sequence_length=length)
            tokens, longer = int(lengths.sum()), int((found.lengths > length).sum())
            table[pool] = len(packed.row_ends), tokens, int(found.lengths.sum()) - tokens, longer
        return Counted(*table.T)


def _padded(pieces: Int64, firsts: Int64, ends: Int64, length: int) -> tuple[Int64, Int64, Int64]:
    """Fill every row that is short with a piece of padding; return pieces, and firsts and pasts of rows."""
    held = np.add.reduceat(pieces[:, 2] - pieces[:, 1], firsts) if len(firsts) else firsts
    short = np.flatnonzero(held < length)
    padding = np.zeros((len(short), 4), dtype=np.int64)
    padding[:, 0], padding[:, 2] = PADDING, length - held[short]
    past = ends + np.cumsum(held < length)
    return np.insert(pieces, ends[short], padding, axis=0), np.append(firsts[:1], past[:-1]), past


def _nonzero(count: int) -> list[int]:
    return [count] if count else []

"""Packed pool: the documents of a pool's blocks, shuffled and placed into rows, split or whole.

With the packing "whole", a document belongs to the pool in whose blocks it starts; a longer one is read
beyond them. The number of rows is known only after packing, so all pools are packed once, on the first
access to the order: the result is a table with one row per pool, and sample k is a search in its cumulative
sum. A pool has the same blocks in every epoch and the count does not depend on the order of the documents,
so the table serves all epochs; documents and rows are reshuffled in each. A fixed budget of rows a pool
would be half empty.

A document longer than a row is truncated, dropped, or refused (`overlong`). After a change of the
sequence length all documents that were not served yet are packed again, so one that was too long may fit.
"""

from collections.abc import Iterator, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from penstock.core.arrays import Int64, Table, address
from penstock.core.errors import ConfigError
from penstock.core.rng import shuffled
from penstock.core.units import plural
from penstock.data.native import library
from penstock.data.order.holdout import TokenSpace
from penstock.data.order.row_order import Order, RepackPoint
from penstock.data.packing import PACKERS, check_packing, overlong_unset
from penstock.data.types import PADDING, Fragments, Waste

if TYPE_CHECKING:
    from penstock.data.corpus.corpus import Corpus, ShardRanges


@dataclass(frozen=True, slots=True)
class CountedRows:
    """Row and token counts of every pool after packing; all arrays are [pools] int64."""

    rows: Int64
    tokens: Int64
    """Tokens in those rows; the other positions are padding."""
    left_out: Int64
    """Tokens that were truncated or dropped."""
    documents: Int64
    """Documents that were truncated or dropped."""


# Counting takes about 1 s per 10^9 tokens, and every change of a run builds new orders.
_PACKED = 128  # pools cached: one per lane, and some from before a change of the sequence length
_known: "WeakKeyDictionary[Corpus, dict[tuple[str, str, str | None, int], CountedRows]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class PackedPool:
    """Rows of a pool as pieces of documents; 16 bytes per piece, 0.3 MB for 16 million tokens."""

    pieces: Table
    """[p, 4]: shard (or PADDING), first token, past-the-last token, and whether the document continues
    after the piece. The pieces of a row are adjacent and sum to L tokens. int32 if the values fit: allocating
    fresh memory costs more than filling it."""
    firsts: memoryview
    """First piece of each row, rows in training order; a memoryview, which is faster to index than an
    array."""
    pasts: memoryview
    """Past-the-last piece of each row."""

    def attention_pairs(self) -> Int64:
        """Return the number of position pairs that attention within documents computes for each row.

        A position attends to itself and to earlier positions of its document: n (n + 1) / 2 pairs for n
        tokens.
        """
        lengths = self.pieces[:, 2].astype(np.int64) - self.pieces[:, 1]
        sums = np.concatenate(([0], np.cumsum(lengths * (lengths + 1) // 2)))
        return np.asarray(sums[np.asarray(self.pasts)] - sums[np.asarray(self.firsts)])

    def rows_with(self, shard: int, start: int, stop: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (row, (start, stop)) for each row that contains any of a shard's tokens [start, stop)."""
        low = np.maximum(self.pieces[:, 1], np.int64(start))
        high = np.minimum(self.pieces[:, 2], np.int64(stop))
        found = np.flatnonzero((self.pieces[:, 0] == shard) & (low < high))
        by_first = np.argsort(self.firsts)
        rows = by_first[np.searchsorted(np.asarray(self.firsts)[by_first], found, side="right") - 1]
        for row, piece in zip(rows.tolist(), found.tolist(), strict=True):
            yield row, (int(low[piece]), int(high[piece]))


class WholePools:
    """Pools of a token space under a packing rule that pads rows, such as "whole".

    Args:
        rule: packing rule, a name in PACKERS; one of PADDING_RULES.
        overlong: "truncate" or "drop" longer documents; None: refuse them.

    Raises:
        UsageError: no such rule.
        ConfigError: the rule splits documents.
    """

    def __init__(self, space: TokenSpace, rule: str, overlong: str | None) -> None:
        check_packing(rule, overlong)
        self._space = space
        self._rule = rule
        self._overlong = overlong
        self._packed: dict[tuple[str, int, int, tuple[RepackPoint, ...]], PackedPool] = {}
        self._lock = Lock()

    def check(self, order: Order) -> None:
        """Refuse documents longer than a row, unless `overlong` says what becomes of them.

        Raises:
            ConfigError: with their number, and the length of the longest.
        """
        if self._overlong is not None:
            return
        length, longer, longest = order.geometry.sequence_length, 0, 0
        for pool in range(order.num_pools):
            lengths = self._space.documents(order.blocks.of_pool(0, pool)).lengths
            longer += int((lengths > length).sum())
            longest = max(longest, int(lengths.max(initial=0)))
        if longer:
            name = order.name.partition("\0")[0]
            raise overlong_unset(
                f"Corpus {name!r} has {plural(longer, 'document')} longer than a row of {length:,} tokens, "
                f"the longest of {longest:,}"
            )

    def counted(self, order: Order) -> CountedRows:
        """Return the row and token counts of all pools, valid in every epoch."""
        known = _known.setdefault(self._space.corpus, {})
        key = (order.identity, self._rule, self._overlong, self._space.key)
        if key not in known:
            known[key] = self._count(order)
        return known[key]

    def rows(self, order: Order) -> Int64:
        """Return the rows of all pools, valid in every epoch.

        Raises:
            ConfigError: no document fits a row.
        """
        rows = self.counted(order).rows
        if not rows.any():
            raise ConfigError(
                f"No document of corpus {order.name!r} fits a row of {order.geometry.sequence_length} tokens",
                fix="Set a longer sequence_length, or overlong='truncate'.",
            )
        return rows

    def rows_left(self, order: Order, epoch: int, pool: int, repacks: Sequence[RepackPoint]) -> int:
        """Return the number of rows that a pool's unserved documents fill."""
        return len(self.pack(order, epoch=epoch, pool=pool, repacks=repacks).firsts)

    def waste(self, order: Order, pools: int) -> Waste:
        """Return the waste of the first `pools` pools, valid in every epoch."""
        counted, length = self.counted(order), order.geometry.sequence_length
        rows, tokens = int(counted.rows[:pools].sum()), int(counted.tokens[:pools].sum())
        left_out, documents = int(counted.left_out[:pools].sum()), int(counted.documents[:pools].sum())
        return Waste(rows * length - tokens, left_out, documents)

    def waste_in(
        self, order: Order, epoch: int, pool: int, rows: int, repacks: Sequence[RepackPoint]
    ) -> Waste:
        """Return the waste of the first rows of a pool, minus what was counted before the last length change.

        Left-out tokens are counted when the last row of a pool is served. If the sequence length then changes
        and a document that was too long fits after all, the difference is negative.
        """
        if not rows and not repacks and self.counted(order).rows[pool]:
            return Waste()  # not begun: no need to pack it
        packed = self.pack(order, epoch=epoch, pool=pool, repacks=repacks)
        last = packed.pieces[np.asarray(packed.pasts)[:rows] - 1]  # padding is the last piece of a row
        padding = last[last[:, 0] == PADDING, 2].sum()
        wasted = self._left_out(order, epoch, pool, rows, repacks) + Waste(padding=int(padding))
        if not repacks:
            return wasted
        *earlier, repack = repacks
        before = order.at_length(repack.sequence_length)
        return wasted - self._left_out(before, epoch, pool, repack.rows, earlier)

    def _left_out(
        self, order: Order, epoch: int, pool: int, rows: int, repacks: Sequence[RepackPoint]
    ) -> Waste:
        """Return the tokens and documents of a pool that are never served, once its last row is served."""
        if rows < self.rows_left(order, epoch, pool, repacks):
            return Waste()
        found = self._space.documents(order.blocks.of_pool(epoch, pool))
        done = [*repacks, RepackPoint(order.geometry.sequence_length, rows)]
        filled = [self._served(order, epoch, pool, done[: number + 1]) for number in range(len(done))]
        starts, lengths = (np.concatenate(of) for of in zip(*filled, strict=True))
        missing, by_start = found.lengths.copy(), np.argsort(found.starts)
        missing[by_start[np.searchsorted(found.starts, starts, sorter=by_start)]] -= lengths
        return Waste(left_out=int(missing.sum()), documents=int(np.count_nonzero(missing)))

    def _served(
        self, order: Order, epoch: int, pool: int, repacks: Sequence[RepackPoint]
    ) -> tuple[Int64, Int64]:
        """Return starts and lengths of the documents served between the last two sequence-length changes."""
        *earlier, repack = repacks
        packed = self.pack(order.at_length(repack.sequence_length), epoch=epoch, pool=pool, repacks=earlier)
        spans = zip(packed.firsts[: repack.rows], packed.pasts[: repack.rows], strict=True)
        filled = np.concatenate([packed.pieces[:0], *(packed.pieces[first:past] for first, past in spans)])
        filled = filled[filled[:, 0] != PADDING]
        return self._space.corpus.starts[filled[:, 0]] + filled[:, 1], filled[:, 2] - filled[:, 1]

    def pack(self, order: Order, *, epoch: int, pool: int, repacks: Sequence[RepackPoint] = ()) -> PackedPool:
        """Pack a pool, or return it from the cache: shuffle its documents, pack them, shuffle the rows.

        Args:
            repacks: sequence-length changes since the pool was begun.
        """
        key = (order.identity, epoch, pool, tuple(repacks))
        packed = self._packed.get(key)
        if packed is None:
            packed = self._pack(order, epoch, pool, repacks)
            with self._lock:
                self._packed[key] = packed
                while len(self._packed) > _PACKED:
                    self._packed.pop(next(iter(self._packed)))
        return packed

    def _pack(self, order: Order, epoch: int, pool: int, repacks: Sequence[RepackPoint]) -> PackedPool:
        length = order.geometry.sequence_length
        found = self.documents(order, epoch=epoch, pool=pool, repacks=repacks)
        keys = [order.key(purpose, epoch, pool, *_nonzero(len(repacks))) for purpose in ("documents", "rows")]
        found = self._kept(found.take(shuffled(len(found), keys[0])), length)
        packed = PACKERS[self._rule](
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

    def documents(
        self, order: Order, *, epoch: int, pool: int, repacks: Sequence[RepackPoint] = ()
    ) -> Fragments:
        """Return the documents of a pool that were not served before the last sequence-length change."""
        found = self._space.documents(order.blocks.of_pool(epoch, pool))
        for number in range(len(repacks)):
            starts, _ = self._served(order, epoch, pool, repacks[: number + 1])
            found = found.take(np.flatnonzero(~np.isin(found.starts, starts)))
        return found

    def _kept(self, found: Fragments, length: int) -> Fragments:
        if self._overlong != "drop":
            return found
        return found.take(np.flatnonzero(found.lengths <= length))

    def _count(self, order: Order) -> CountedRows:
        length = order.geometry.sequence_length
        table = np.zeros((order.num_pools, 4), dtype=np.int64)
        for pool in range(order.num_pools):
            found = self._space.documents(order.blocks.of_pool(0, pool))
            lengths = np.minimum(self._kept(found, length).lengths, length)
            packed = PACKERS[self._rule](lengths, num_rows=len(lengths), sequence_length=length)
            tokens, longer = int(lengths.sum()), int((found.lengths > length).sum())
            table[pool] = len(packed.row_ends), tokens, int(found.lengths.sum()) - tokens, longer
        return CountedRows(*table.T)


def _padded(pieces: Int64, firsts: Int64, ends: Int64, length: int) -> tuple[Int64, Int64, Int64]:
    """Pad short rows; return the pieces, and first and past-the-last piece of each row."""
    filled = np.add.reduceat(pieces[:, 2] - pieces[:, 1], firsts) if len(firsts) else firsts
    short = np.flatnonzero(filled < length)
    padding = np.zeros((len(short), 4), dtype=np.int64)
    padding[:, 0], padding[:, 2] = PADDING, length - filled[short]
    past = ends + np.cumsum(filled < length)
    return np.insert(pieces, ends[short], padding, axis=0), np.append(firsts[:1], past[:-1]), past


def _nonzero(count: int) -> list[int]:
    return [count] if count else []


COMPILED = ("best_fit", "concat")
"""Packing rules that native/pools.c implements."""


def pack_pool(
    space: TokenSpace,
    order: Order,
    *,
    epoch: int,
    pool: int,
    rule: str,
    repacks: Sequence[RepackPoint] = (),
) -> PackedPool:
    """Pack a pool: shuffle its fragments, pack them, shuffle the rows.

    Args:
        rule: packing rule, a name in PACKERS.
        repacks: sequence-length changes since the pool was begun. After each, the remaining pieces are joined
            where they are adjacent, shuffled and packed again at the next length: every token once.
    """
    keys = [
        order.key(purpose, epoch, pool, *([len(repacks)] if repacks else []))
        for purpose in ("documents", "rows")
    ]
    length = order.geometry.sequence_length
    if repacks:
        *earlier, repack = repacks
        longer = order.at_length(repack.sequence_length)
        packed = pack_pool(space, longer, epoch=epoch, pool=pool, rule=rule, repacks=earlier)
        return _pack(_left_over(packed, space, after=repack.rows), space, length=length, rule=rule, keys=keys)
    ranges = space.in_corpus(order.blocks.of_pool(epoch, pool))
    if rule in COMPILED and (compiled := library()) is not None:
        shard_ranges = space.corpus.shard_ranges(ranges)
        if shard_ranges and (
            made := _compiled_pack(compiled, shard_ranges, length=length, rule=rule, keys=keys)
        ):
            return made
    return _pack(space.corpus.fragments(ranges), space, length=length, rule=rule, keys=keys)


def _compiled_pack(
    compiled: CDLL, shard_ranges: "ShardRanges", *, length: int, rule: str, keys: Sequence[int]
) -> PackedPool | None:
    """Pack a pool in native/pools.c, as `fragments` and `_pack` do; None if document ends do not ascend."""
    table = shard_ranges.table
    at, count = address(table), len(table)
    most = compiled.penstock_find_ends(at, count)
    if most < 0:
        return None
    num_rows = -(-int((table[:, 2] - table[:, 1]).sum()) // length)
    dtype = np.dtype(np.int32 if table[:, 2].max() < 2**31 else np.int64)
    pieces = np.empty((most + 2 * num_rows + 1, 4), dtype=dtype)
    rows = np.empty((2, num_rows), dtype=np.int32)
    rows_at = address(rows)
    found = compiled.penstock_pack(
        at,
        count,
        most,
        num_rows,
        length,
        rule == "best_fit",
        *keys,
        dtype.itemsize == 8,
        address(pieces),
        rows_at,
        rows_at + 4 * num_rows,
    )
    if found < 0:
        raise MemoryError(f"no memory to pack {most} documents")
    return PackedPool(pieces[:found], rows[0].data, rows[1].data)


def _pack(found: Fragments, space: TokenSpace, *, length: int, rule: str, keys: Sequence[int]) -> PackedPool:
    mix = shuffled(len(found), keys[0])
    lengths = found.lengths[mix]
    num_tokens = int(lengths.sum())
    num_rows = -(-num_tokens // length)
    packed = PACKERS[rule](lengths, num_rows=num_rows, sequence_length=length)

    of = mix[packed.fragment]
    in_shard = found.starts - space.corpus.starts[found.shards]
    ends = in_shard + found.lengths + found.continued  # +1: a continued fragment does not end its document
    start = in_shard[of] + packed.offset
    past = start + packed.length
    pieces = np.empty((len(of), 4), dtype=np.int32 if past.max(initial=0) < 2**31 else np.int64)
    pieces[:, 0], pieces[:, 1], pieces[:, 2] = found.shards[of], start, past
    pieces[:, 3] = past < ends[of]
    row_ends = packed.row_ends
    if short := num_rows * length - num_tokens:
        pieces = np.concatenate((pieces, np.array([[PADDING, 0, short, 0]], dtype=pieces.dtype)))
        row_ends = np.append(row_ends[:-1], len(pieces))
    # Rows are shuffled so that the pieces of a long document are not consecutive; the last row stays last,
    # because it may be padded.
    rows = np.append(shuffled(num_rows - 1, keys[1]), num_rows - 1)
    row_starts = np.concatenate((np.zeros(1, dtype=np.int64), row_ends[:-1]))
    firsts, pasts = row_starts[rows].astype(np.int32), row_ends[rows].astype(np.int32)
    return PackedPool(pieces, memoryview(firsts), memoryview(pasts))


def _left_over(packed: PackedPool, space: TokenSpace, *, after: int) -> Fragments:
    """Return the contents of the rows from `after` on as fragments in corpus order, adjacent ones joined."""
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

"""Look-ahead for remote corpora: fetch the tokens that are read next, and tell the cache what to keep.

The order is a function, so both are known exactly. On the first read of a row of a pool, the pool's document
boundaries are read in parallel and its tokens are fetched in the background. After half of its rows, the same
happens for the next pool of its lane. For any token range, `next_use` tells a full cache when it is read
again. For local corpora this module does nothing.

For pools of other ranks' lanes the document boundaries are read too, because every rank must know the cost of
all rows (see reader.py), but only the tokens of the few rows that this rank reads.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from penstock.core.arrays import Float64, Int64, Table
from penstock.core.errors import CorpusError
from penstock.data.types import PADDING
from penstock.storage.base import FarSlices

if TYPE_CHECKING:
    from penstock.data.corpus.corpus import Corpus
    from penstock.data.order.epochs import EpochEntry
    from penstock.data.order.holdout import TokenSpace
    from penstock.data.order.row_order import Order

_SIDE_BY_SIDE = 16  # shards opened in parallel
_POOLS_AT_ONCE = 4
_REMEMBERED = 4096  # pools recorded as begun

Pool = tuple[str, int, int, bool]
"""Entry identity, epoch, pool number, and whether its tokens are fetched or only its document boundaries."""
Spans = dict[int, list[tuple[int, int]]]
"""Token ranges [start, stop) by shard."""


class Lookahead:
    """Background fetching for one corpus of a run. Thread-safe.

    Args:
        max_epochs: cap on epochs; nothing beyond it is fetched. None: no cap.
    """

    def __init__(self, corpus: "Corpus", *, max_epochs: int | None) -> None:
        self._corpus = corpus
        self._max_epochs = max_epochs
        self._far = "://" in corpus.location
        self._begun: OrderedDict[Pool, Sequence[Future[None]]] = OrderedDict()
        self._due: dict[Pool, int] = {}  # row from which on a pool needs attention again
        self._seen: WeakValueDictionary[int, FarSlices] = WeakValueDictionary()  # tokens of open shards
        self._last_read: tuple[EpochEntry, int, int] | None = None  # entry, epoch, group of the last read
        self._lock = threading.Lock()
        self._background = ThreadPoolExecutor(_POOLS_AT_ONCE, "penstock-lookahead") if self._far else None

    def read(
        self, entries: "Sequence[EpochEntry]", addresses: Sequence[Sequence[int]], *, tokens: bool = True
    ) -> None:
        """Announce that rows are about to be read; returns once their document boundaries are available.

        Args:
            entries: of the epoch schedule that the rows belong to.
            addresses: [n][4] entry, epoch, pool, row.
            tokens: True to fetch the tokens of their pools.
        """
        if self._background is None or not addresses:
            return
        ids, due_row, begun = [entry.identity for entry in entries], self._due.get, {}
        for entry, epoch, pool, row in addresses:
            if row >= due_row((ids[entry], epoch, pool, tokens), 0):
                begun[ids[entry], epoch, pool, tokens] = self._prefetch_pool(
                    entries[entry], epoch, pool, row, tokens
                )
        entry, epoch, pool, _ = addresses[-1]
        self._last_read = entries[entry], epoch, pool // entries[entry].order.geometry.lanes
        if begun:
            self._await(begun)

    def fetch(self, rows: Sequence[Table]) -> None:
        """Start fetching the tokens of rows (piece tables), and the token after each piece for its label."""
        if self._background is None:
            return
        for shard, start, stop, goes_on in (piece for row in rows for piece in row.tolist()):
            tokens = None if shard == PADDING else self._corpus.shard(shard).tokens
            if isinstance(tokens, FarSlices):
                tokens.fetch_ahead(start, stop + goes_on)
                for column in self._corpus.columns.values():
                    column.fetch_ahead(shard, start, stop + goes_on)

    def _await(self, begun: "Mapping[Pool, tuple[Sequence[Future[None]], int]]") -> None:
        for futures, _ in begun.values():
            for pool in futures:  # a block read before it is queued would be fetched in small windows
                pool.result()
        due = self._due
        with self._lock:
            due.update((key, row) for key, (_, row) in begun.items())
            while len(due) > _REMEMBERED:
                del due[next(iter(due))]

    def _prefetch_pool(
        self, entry: "EpochEntry", epoch: int, pool: int, row: int, tokens: bool
    ) -> "tuple[Sequence[Future[None]], int]":
        """Begin a pool, and in its second half its lane's next; return futures and the next row to act on."""
        middle = -(-entry.order.geometry.rows_per_pool // 2)
        if row >= middle and (after := self._after(entry, epoch, pool)):
            self._begin_once(entry, *after, tokens)
        return self._begin_once(entry, epoch, pool, tokens), middle if row < middle else sys.maxsize

    def _begin_once(
        self, entry: "EpochEntry", epoch: int, pool: int, tokens: bool
    ) -> "Sequence[Future[None]]":
        """Begin a pool in the background unless it was begun or is cached; return its pending futures."""
        key = entry.identity, epoch, pool, tokens
        if (begun := self._begun.get(key)) is not None:
            return begun
        with self._lock:
            if key not in self._begun:
                assert self._background is not None
                spans = self._spans(entry.space, entry.order, epoch, pool)
                self._begun[key] = (
                    () if self._are_here(spans) else (self._background.submit(self._begin, spans, tokens),)
                )
                if len(self._begun) > _REMEMBERED:
                    self._begun.popitem(last=False)
            return self._begun[key]

    def _spans(self, space: "TokenSpace", order: "Order", epoch: int, pool: int) -> Spans:
        """Return the token ranges of a pool by shard."""
        spans: Spans = {}
        for shard, low, high in self._corpus.spans(space.in_corpus(order.blocks.of_pool(epoch, pool))):
            spans.setdefault(shard, []).append((low, high))
        return spans

    def _are_here(self, spans: Spans) -> bool:
        """Return True if all ranges are cached; False for a shard that was not opened yet."""
        seen = self._seen
        return all(
            (tokens := seen.get(shard)) is not None and all(tokens.is_here(low, high) for low, high in parts)
            for shard, parts in spans.items()
        )

    def _after(self, entry: "EpochEntry", epoch: int, pool: int) -> tuple[int, int] | None:
        """Return (epoch, pool) that the lane reads next; None at the end of the entry or the run."""
        lanes = entry.order.geometry.lanes
        if pool + lanes < entry.order.num_pools:
            return epoch, pool + lanes
        ends = [end for end in (self._max_epochs, entry.epochs and entry.first + entry.epochs) if end]
        return (epoch + 1, pool % lanes) if epoch + 1 < min(ends, default=epoch + 2) else None

    def _begin(self, spans: Spans, tokens: bool) -> None:
        """Read the document boundaries of a pool, shards in parallel; if `tokens`, start fetching them."""
        if not threading.main_thread().is_alive():  # the program is exiting: queued work is no longer needed
            return
        with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(spans)), "penstock-lookahead-open") as threads:
            list(threads.map(partial(self._open_shard, tokens=tokens), spans, spans.values()))

    def _open_shard(self, index: int, spans: Sequence[tuple[int, int]], *, tokens: bool) -> None:
        try:
            shard = self._corpus.shard(index)
            if isinstance(shard.tokens, FarSlices):
                shard.tokens.next_use = partial(self._next_use, int(self._corpus.starts[index]))
                self._seen[index] = shard.tokens
                for low, high in spans:
                    shard.document_ends(low, high)
                    if tokens:
                        shard.tokens.fetch_ahead(low, high)
                        for column in self._corpus.columns.values():
                            column.fetch_ahead(index, low, high, shard.tokens.next_use)
        except CorpusError:
            return  # the reader gets the same error when it reads this shard in order

    def _next_use(self, base: int, starts: Int64, stops: Int64) -> Float64:
        """Return the number of samples until any of a shard's tokens [start, stop) is read next: [n]."""
        if self._last_read is None:
            return np.zeros(len(starts))
        entry, epoch, group = self._last_read
        return next_use(entry, starts + base, stops + base, epoch=epoch, group=group)


def next_use(entry: "EpochEntry", starts: Int64, stops: Int64, *, epoch: int, group: int) -> Float64:
    """Return the number of samples until corpus tokens [start, stop) are read next: [n].

    Distances are whole groups of pools.

    Only this epoch and the next of this entry are considered; otherwise the distance is infinite. One token
    per block is tested, so a range that crosses a gap of the token space or the seam of a rotated grid may be
    reported too late, never too early.

    Args:
        starts: [n] corpus positions.
        stops: [n] past-the-last positions.
        epoch: epoch being read.
        group: group of pools being read; its tokens are 0 samples away.
    """
    order, space = entry.order, entry.space
    size, lanes = order.geometry.block_tokens, order.geometry.lanes
    groups = -(-order.num_pools // lanes)
    steps = np.arange(0, int((stops - starts).max(initial=1)) + size, size)
    positions = np.minimum(starts[:, None] + steps, stops[:, None] - 1)  # one in every block touched
    inside, held = space.locate(positions)
    found = np.full(positions.shape, np.inf)
    for later in (0, 1):
        far = order.blocks.pools_at(epoch + later, inside) // lanes - group + later * groups
        np.minimum(found, np.where(held & (far >= 0), far, np.inf), out=found)
    return np.asarray(found.min(axis=1) * lanes * order.geometry.rows_per_pool)

"""Tell a far corpus's storage what a run reads next: what to fetch now, and what to keep longest.

The order is a function, so both are known exactly. When a row of a pool is first asked for, the document
boundaries of the pool are read side by side and its tokens are fetched in the background; when half of its
rows are read, the same is done for the pool that its lane reads next. And any stretch of tokens can be asked
when it is read again, which is what a full cache needs to know. For a corpus on this machine nothing is done.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from weakref import WeakValueDictionary

import numpy as np

from penstock.core.errors import CorpusError
from penstock.data.corpus import Corpus
from penstock.data.holdout import TokenSpace
from penstock.data.legs import Leg
from penstock.data.order import Order
from penstock.data.storage import FarSlices, Float64
from penstock.data.types import Int64

_SIDE_BY_SIDE = 16  # shards opened at once
_POOLS_AT_ONCE = 4
_REMEMBERED = 4096  # pools that were begun

Pool = tuple[str, int, int]
"""Identity of its leg, epoch, number."""
Spans = dict[int, list[tuple[int, int]]]
"""Token ranges [start, stop) by shard."""


class Lookahead:
    """What one corpus of a run will read. Thread-safe.

    Args:
        max_epochs: epochs beyond it are not fetched ahead; None for no cap.
    """

    def __init__(self, corpus: Corpus, *, max_epochs: int | None) -> None:
        self._corpus = corpus
        self._max_epochs = max_epochs
        self._far = "://" in corpus.location
        self._begun: OrderedDict[Pool, Sequence[Future[None]]] = OrderedDict()
        self._due: dict[Pool, int] = {}  # from which row on there is something to do for a pool
        self._seen: WeakValueDictionary[int, FarSlices] = WeakValueDictionary()  # of shards that are open
        self._front: tuple[Leg, int, int] | None = None  # leg, epoch, group that were read last
        self._lock = threading.Lock()
        self._background = ThreadPoolExecutor(_POOLS_AT_ONCE, "penstock-lookahead") if self._far else None

    def read(self, legs: Sequence[Leg], places: Sequence[Sequence[int]]) -> None:
        """Note that rows are about to be read; returns when their document boundaries are here.

        Args:
            legs: of the way that the rows are on.
            places: [n][4] leg, epoch, pool, row.
        """
        if self._background is None or not places:
            return
        ids, due_row, begun = [leg.identity for leg in legs], self._due.get, {}
        for leg, epoch, pool, row in places:
            if row >= due_row((ids[leg], epoch, pool), 0):
                begun[ids[leg], epoch, pool] = self._reach(legs[leg], epoch, pool, row)
        leg, epoch, pool, _ = places[-1]
        self._front = legs[leg], epoch, pool // legs[leg].order.geometry.lanes
        if begun:
            self._await(begun)

    def _await(self, begun: "Mapping[Pool, tuple[Sequence[Future[None]], int]]") -> None:
        for under_way, _ in begun.values():
            for pool in under_way:  # what is read before its block is queued would be fetched in windows
                pool.result()
        due = self._due
        with self._lock:
            due.update((key, row) for key, (_, row) in begun.items())
            while len(due) > _REMEMBERED:
                del due[next(iter(due))]

    def _reach(self, leg: Leg, epoch: int, pool: int, row: int) -> "tuple[Sequence[Future[None]], int]":
        """Begin a pool, from its middle on its lane's next; return what to await and the next row to tell."""
        middle = -(-leg.order.geometry.rows_per_pool // 2)
        if row >= middle and (after := self._after(leg, epoch, pool)):
            self._once(leg, *after)
        return self._once(leg, epoch, pool), middle if row < middle else sys.maxsize

    def _once(self, leg: Leg, epoch: int, pool: int) -> "Sequence[Future[None]]":
        """Begin a pool in the background, unless it was begun or is here; return what is under way of it."""
        key = leg.identity, epoch, pool
        if (begun := self._begun.get(key)) is not None:
            return begun
        with self._lock:
            if key not in self._begun:
                assert self._background is not None
                spans = self._spans(leg.space, leg.order, epoch, pool)
                self._begun[key] = (
                    () if self._are_here(spans) else (self._background.submit(self._begin, spans),)
                )
                if len(self._begun) > _REMEMBERED:
                    self._begun.popitem(last=False)
            return self._begun[key]

    def _spans(self, space: TokenSpace, order: Order, epoch: int, pool: int) -> Spans:
        """Return which tokens of which shards a pool is made of."""
        spans: Spans = {}
        for shard, low, high in self._corpus.spans(space.in_corpus(order.blocks.of_pool(epoch, pool))):
            spans.setdefault(shard, []).append((low, high))
        return spans

    def _are_here(self, spans: Spans) -> bool:
        """Return whether all of some tokens can be read without waiting; a shard not seen before is not."""
        seen = self._seen
        return all(
            (tokens := seen.get(shard)) is not None and all(tokens.is_here(low, high) for low, high in parts)
            for shard, parts in spans.items()
        )

    def _after(self, leg: Leg, epoch: int, pool: int) -> tuple[int, int] | None:
        """Return the pool that the lane of a pool reads next; None where the leg or the run ends."""
        lanes = leg.order.geometry.lanes
        if pool + lanes < leg.order.num_pools:
            return epoch, pool + lanes
        ends = [end for end in (self._max_epochs, leg.epochs and leg.first + leg.epochs) if end]
        return (epoch + 1, pool % lanes) if epoch + 1 < min(ends, default=epoch + 2) else None

    def _begin(self, spans: Spans) -> None:
        """Read the document boundaries of a pool, shards side by side, and begin to fetch its tokens."""
        if not threading.main_thread().is_alive():  # the program ends: what waits here is no longer wanted
            return
        with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(spans)), "penstock-lookahead-open") as threads:
            list(threads.map(self._bring, spans, spans.values()))

    def _bring(self, index: int, spans: Sequence[tuple[int, int]]) -> None:
        try:
            shard = self._corpus.shard(index)
            if isinstance(shard.tokens, FarSlices):
                shard.tokens.next_use = partial(self._next_use, int(self._corpus.starts[index]))
                self._seen[index] = shard.tokens
                for low, high in spans:
                    shard.document_ends(low, high)
                    shard.tokens.fetch_ahead(low, high)
        except CorpusError:
            return  # who reads the same in order is told

    def _next_use(self, base: int, starts: Int64, stops: Int64) -> Float64:
        """Return the samples until any of a shard's tokens [start, stop) is next read: [n]."""
        if self._front is None:
            return np.zeros(len(starts))
        leg, epoch, group = self._front
        return next_use(leg, starts + base, stops + base, epoch=epoch, group=group)


def next_use(leg: Leg, starts: Int64, stops: Int64, *, epoch: int, group: int) -> Float64:
    """Return how many samples before corpus tokens [start, stop) are next read, whole groups of pools.

    Only this epoch and the next are looked at: what is read in neither by this leg is infinitely far.
    Tokens are looked at once a block: what runs over a gap of the space or the seam of a rotated grid may
    be told late, never early.

    Args:
        starts: [n] corpus positions.
        stops: [n] past-the-last ones.
        epoch: that is read now.
        group: of pools that is read now; what it holds is 0 samples away.
    """
    order, space = leg.order, leg.space
    size, lanes = order.geometry.block_tokens, order.geometry.lanes
    groups = -(-order.num_pools // lanes)
    steps = np.arange(0, int((stops - starts).max(initial=1)) + size, size)
    positions = np.minimum(starts[:, None] + steps, stops[:, None] - 1)  # one in every block that is touched
    inside, held = space.locate(positions)
    found = np.full(positions.shape, np.inf)
    for later in (0, 1):
        far = order.blocks.pools_at(epoch + later, inside) // lanes - group + later * groups
        np.minimum(found, np.where(held & (far >= 0), far, np.inf), out=found)
    return np.asarray(found.min(axis=1) * lanes * order.geometry.rows_per_pool)

"""Memory spans of rows: addresses and lengths for the compiled gather (native/rows.c).

A pool whose shards are memory maps is turned once into a table of addresses, each checked against the bounds
of its map; a step is then two integer arrays: the pool of each row, and the row within the pool. Tokens that
are fetched or converted have no address: those rows go through collate.py.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from threading import Lock

import numpy as np

from penstock.core.arrays import Int32, Int64, address
from penstock.core.errors import CorpusError
from penstock.data.corpus.corpus import Corpus, TokenMap
from penstock.data.order.pool import PackedPool
from penstock.data.packing.best_fit import stable_order
from penstock.data.types import PADDING

_MAX_SHARDS = 32  # maps that a pool keeps open: its 16 blocks need fewer unless shards are tiny

PoolKey = tuple[int, int, int]
"""Entry, epoch and number of a pool."""


@dataclass(frozen=True, slots=True)
class PoolSpans:
    """Pool in the layout of the compiled gather."""

    spans: Int64
    """[p, 2] address of the first token (0: padding); then tokens << 2 | document continues << 1 | type."""
    firsts: Int32
    """First span of each row."""
    pasts: Int32
    """Past-the-last span of each row."""
    maps: Sequence[TokenMap]
    """Memory maps that the addresses point into, kept alive."""
    addresses: tuple[int, int, int]
    """Addresses of spans, firsts and pasts: `pool` in rows.c."""


def spans_of(compiled: CDLL, packed: PackedPool, corpus: Corpus) -> PoolSpans | None:
    """Return the memory spans of a pool; None if some shard is not a memory map.

    Raises:
        CorpusError: a piece lies outside its shard.
    """
    pieces = np.ascontiguousarray(packed.pieces)
    maps: list[TokenMap] = []
    shards = np.flatnonzero(np.bincount(pieces[:, 0] - PADDING)) + PADDING  # distinct values
    for shard in shards[shards != PADDING].tolist():
        if len(maps) == _MAX_SHARDS or (found := corpus.token_map(shard)) is None:
            return None
        maps.append(found)
    table = np.array([found.record for found in maps], dtype=np.int64)
    spans = np.empty((len(pieces), 2), dtype=np.int64)
    at, spans_at = address(pieces), address(spans)
    is_wide = pieces.itemsize == 8
    if compiled.penstock_spans(at, is_wide, len(pieces), address(table), len(maps), spans_at):
        raise CorpusError(
            f"A document of corpus {corpus.location} lies outside its shard",
            fix="Run `penstock data verify` on it.",
        )
    firsts, pasts = (np.asarray(of, dtype=np.int32) for of in (packed.firsts, packed.pasts))
    return PoolSpans(spans, firsts, pasts, maps, (spans_at, address(firsts), address(pasts)))


class StepSpans:
    """Rows of a batch in the layout of the compiled gather; its addresses are valid while the object lives.

    Args:
        owner: opens their pools.
        slots: [n] int64 pool of each row.
        at: addresses of the table of pools, of the slots, and of [n] int64 row within the pool.
        held: other object to keep alive.
    """

    __slots__ = ("at", "held", "num_rows", "owner", "slots")

    def __init__(
        self, owner: "RowSpans", slots: Int64, at: tuple[int, int, int], held: object = None
    ) -> None:
        self.owner, self.slots, self.at, self.held = owner, slots, at, held
        self.num_rows = len(slots)

    def count(self, compiled: CDLL) -> int | None:
        """Return the number of spans after opening the pools; None if some are not in memory maps.

        A pool is opened at the first step that needs it, and read ahead after the rows of that step.
        """
        found: int = compiled.penstock_count_spans(*self.at, self.num_rows)
        if found >= 0:
            return found
        opened = self.owner.open(self.slots)
        if opened is None:
            return None
        compiled.penstock_read_rows_ahead(*self.at, self.num_rows)
        for slot in opened:
            self.owner.read_ahead(slot)
        return int(compiled.penstock_count_spans(*self.at, self.num_rows))


class RowSpans:
    """Rows of several steps; pools are opened at the first step that needs them. Thread-safe.

    Args:
        corpus: [steps, n] indices of corpora.
        row_addresses: [steps, n, 4] entry, epoch, pool, row.
        find: (corpus, (entry, epoch, pool)) -> spans of the pool; None if it is not in memory maps.
        read_ahead: (corpus, (entry, epoch, pool)) -> asks the system to read the pool ahead.
    """

    def __init__(
        self,
        corpus: Int64,
        row_addresses: Int64,
        find: Callable[[int, PoolKey], PoolSpans | None],
        read_ahead: Callable[[int, PoolKey], None],
    ) -> None:
        columns = [corpus.reshape(-1), *(row_addresses[..., column].reshape(-1) for column in range(3))]
        slots, firsts = _numbered(columns)
        keys = zip(*(column[firsts].tolist() for column in columns), strict=True)
        self._keys = [(number, (entry, epoch, pool)) for number, entry, epoch, pool in keys]
        self._find, self._read_ahead = find, read_ahead
        self._slots = slots.reshape(corpus.shape)
        self._rows = np.ascontiguousarray(row_addresses[..., 3])
        self._table = np.zeros((len(self._keys), 3), dtype=np.int64)  # `pool` of rows.c, 0 if not open
        self._found: list[PoolSpans | None] = [None] * len(self._keys)
        self._lock = Lock()
        self._at = address(self._table), address(self._slots), address(self._rows)  # looked up once
        self._bytes = 8 * corpus.shape[-1]

    def step(self, index: int, chosen: Int64 | None = None) -> StepSpans:
        """Return the rows of a step.

        Args:
            chosen: rows of the step to take, in this order; None: all.
        """
        table, slots_at, rows_at = self._at
        if chosen is None:
            offset = index * self._bytes
            return StepSpans(self, self._slots[index], (table, slots_at + offset, rows_at + offset))
        slots, rows = self._slots[index, chosen], self._rows[index, chosen]
        return StepSpans(self, slots, (table, address(slots), address(rows)), rows)

    def open(self, slots: Int64) -> list[int] | None:
        """Open the pools that are not open yet; return them, or None if some are not in memory maps."""
        opened = []
        for slot in dict.fromkeys(slots.tolist()):
            if self._found[slot] is None:
                if (found := self._find(*self._keys[slot])) is None:
                    return None
                with self._lock:
                    if self._found[slot] is None:  # otherwise another thread opened it first; keep its spans
                        self._found[slot] = found
                        self._table[slot] = found.addresses
                opened.append(slot)
        return opened

    def read_ahead(self, slot: int) -> None:
        """Ask the system to read a pool ahead."""
        self._read_ahead(*self._keys[slot])


def _numbered(columns: Sequence[Int64]) -> tuple[Int64, Int64]:
    """Number the distinct rows of a table given as columns [n].

    Returns:
        [n] number of each row, and [numbers] index of one row with that number.
    """
    found: tuple[Int64, Int64] | None = None
    for column in columns:
        low = column.min()
        if (column == low).all():  # the usual case
            continue
        alone = _dense(column - low)
        found = alone if found is None else _dense(found[0] * len(alone[1]) + alone[0])
    return found or (np.zeros_like(columns[0]), np.zeros(1, dtype=np.int64))


def _dense(values: Int64) -> tuple[Int64, Int64]:
    """Number distinct values [n], each at least 0, in ascending order; returns as `_numbered` does."""
    order = stable_order(values)
    ascending = values[order]
    new = np.concatenate(([False], ascending[1:] != ascending[:-1]))
    numbers = np.empty_like(values)
    numbers[order] = np.cumsum(new)
    new[0] = True
    return numbers, order[new]

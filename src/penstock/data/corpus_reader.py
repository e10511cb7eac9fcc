"""Reader of one corpus of a mixture: row addresses to pieces of documents, through a cache of packed
pools."""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from penstock.core import clock
from penstock.core.arrays import Bool, Int64, Table, address
from penstock.core.checks import at_least, check_table
from penstock.core.errors import ConfigError, CorpusError, CorpusExhausted, nearest
from penstock.data.corpus.open import open_corpus
from penstock.data.lookahead import Lookahead
from penstock.data.native import library
from penstock.data.order.epochs import CorpusEpochs
from penstock.data.order.pool import PackedPool, WholePools, pack_pool
from penstock.data.packing import PADDING_RULES, check_packing, overlong_unset
from penstock.data.row_spans import PoolKey, PoolSpans, spans_of

_GROUPS_KEPT = 2  # groups of pools whose row costs are cached: a step may span two
_AWAY_KEPT = 8  # pools cached for lanes of other ranks, of which few rows are read here
_AHEAD_BYTES = 2**22  # largest pool that is read ahead as a whole
_CHECK_EVERY = 16  # pools from one check to the next while data is in the page cache; costs 1/10 of packing
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two reads of a manifest, which may be remote


Pairs = Int64 | npt.NDArray[np.uint32]
"""Attention pairs of the rows of a pool; uint32 if they fit."""


class CorpusReader:
    """Open corpus of a mixture: its packed pools and rows by address.

    Args:
        name: the corpus's name in the mixture.
        path: folder or address, as `open_corpus` takes it.
        rule: packing rule, a name in PACKERS.
        max_epochs: cap on epochs; samples beyond it are refused. None: no cap.
        ranks: number of ranks that share its lanes.
        wait_seconds: seconds to wait for the next part of a corpus that is still being prepared.
        columns: folder or address of more columns (see corpus/columns.py).
    """

    def __init__(
        self,
        name: str,
        path: str | Path,
        *,
        rule: str,
        max_epochs: int | None,
        ranks: int = 1,
        wait_seconds: float = 600.0,
        columns: str | Path | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self._columns = columns
        self.corpus = open_corpus(path, columns=columns)
        self.max_epochs = max_epochs
        self._rule = rule
        self._ranks = ranks
        self._wait_seconds = wait_seconds
        self._pools: dict[tuple[str, int, int], PackedPool] = {}
        self._pairs: dict[tuple[str, int, int], Pairs] = {}  # attention pairs of the rows of each pool
        self._spans: dict[tuple[str, int, int], PoolSpans | None] = {}
        self._skips_left = 0  # pools assumed to be in the page cache because the last one was
        self._fresh: set[tuple[str, int, int]] = set()  # pools packed but not read ahead yet
        self._lock = Lock()
        self.is_far = "://" in self.corpus.location
        self._lookahead = Lookahead(self.corpus, max_epochs=max_epochs)

    def reopen(self) -> None:
        """Read the corpus's manifest again and reset the look-ahead."""
        self.corpus = open_corpus(self.path, columns=self._columns)
        self._lookahead = Lookahead(self.corpus, max_epochs=self.max_epochs)

    @property
    def appended(self) -> int:
        """Parts of a streamed corpus that was appended to after it was finished; 0 for any other."""
        manifest = self.corpus.manifest
        return 0 if manifest.streamed_parts is None else manifest.adoptable_parts

    def check_supply(self, epochs: CorpusEpochs, last: int) -> None:
        """Refuse a sample beyond the cap on epochs.

        Raises:
            CorpusExhausted: with the number of samples within the cap.
        """
        if not self.supplies(epochs, last):
            assert self.max_epochs is not None
            supply = epochs.max_samples(self.max_epochs)
            raise CorpusExhausted(
                f"Corpus {self.name!r} has given all {supply:,} sequences of its {self.max_epochs} epochs",
                fix="Train for fewer steps, raise its epochs, or give it a smaller weight.",
            )

    def supplies(self, epochs: CorpusEpochs, last: int) -> bool:
        """Return True if sample `last` of a schedule is within the cap on epochs."""
        supply = None if self.max_epochs is None else epochs.max_samples(self.max_epochs)
        return supply is None or last < supply

    def extended_to(self, epochs: CorpusEpochs, sample: int) -> CorpusEpochs:
        """Return the schedule, extended until it contains a sample; waits for a corpus still being prepared.

        Raises:
            CorpusError: no part was finished in time, or the preparation failed.
        """
        while epochs.ends is not None and sample >= epochs.ends:
            finished = self.corpus.manifest.streamed_parts
            known = finished or len(self.corpus.manifest.part_ends)
            if epochs.parts < known:
                epochs = epochs.streamed(self.corpus, known)
            elif finished:
                epochs = epochs.finished(self.corpus)
            else:
                self.wait_for(epochs.parts + 1)
        return epochs

    def wait_for(self, parts: int) -> None:
        """Wait until a corpus that is being prepared has `parts` parts or is complete.

        Raises:
            CorpusError: no part was finished in time, or the preparation failed.
        """
        end, pause = clock.monotonic() + self._wait_seconds, _FIRST_PAUSE_S
        while self.corpus.manifest.streamed_parts == 0 and len(self.corpus.manifest.part_ends) < parts:
            if clock.monotonic() > end:
                raise CorpusError(
                    f"No part of corpus {self.name!r} was finished in {self._wait_seconds:.0f} s",
                    fix="Start its preparation again, or wait for it and resume.",
                )
            clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            before = len(self.corpus.manifest.part_ends)
            self.reopen()
            # No time limit while this process runs the preparation: reopening raises its errors.
            if self.corpus.preparation is not None or len(self.corpus.manifest.part_ends) > before:
                end = clock.monotonic() + self._wait_seconds

    def attention_pairs(
        self, epochs: CorpusEpochs, row_addresses: Int64, *, at_home: Bool | None = None
    ) -> Int64:
        """Return the attention pairs of rows: [n]. Packs their pools but reads no tokens.

        Args:
            row_addresses: [n, 4] entry, epoch, pool, row.
            at_home: [n] True if this rank reads most rows of the row's pool; other pools are not cached, only
                their attention pairs. None: all True.
        """
        row_list = row_addresses.tolist()
        self._lookahead.read(epochs.entries, row_list, tokens=False)
        found = np.empty(len(row_list), dtype=np.int64)
        for index, (entry, epoch, pool, row) in enumerate(row_list):
            is_kept = at_home is None or bool(at_home[index])
            found[index] = self._pairs_of(epochs, (entry, epoch, pool), is_kept=is_kept)[row]
        return found

    def _pairs_of(self, epochs: CorpusEpochs, pool_key: PoolKey, *, is_kept: bool) -> Pairs:
        entry, epoch, pool = pool_key
        key = (epochs.entries[entry].identity, epoch, pool)
        pairs = self._pairs.get(key)
        if pairs is None:
            packed = self.pool(epochs, pool_key) if is_kept else self._packed(epochs, pool_key)
            exact = packed.attention_pairs()
            pairs = (
                exact.astype(np.uint32) if exact.max(initial=0) < 2**32 else exact
            )  # fits up to 92,681 tokens per row
            with self._lock:
                while len(self._pairs) > _GROUPS_KEPT * epochs.entries[entry].order.geometry.lanes:
                    self._pairs.pop(next(iter(self._pairs)))
                self._pairs[key] = pairs
        return pairs

    def rows(self, epochs: CorpusEpochs, row_addresses: Int64, *, at_home: Bool | None = None) -> list[Table]:
        """Return the piece tables of rows: n arrays of pieces as in PackedPool.

        Args:
            row_addresses: [n, 4] entry, epoch, pool, row.
            at_home: [n] True if this rank reads most rows of the row's pool; of other pools only the row is
                fetched. None: all True.
        """
        row_list = row_addresses.tolist()
        away = [] if at_home is None else np.flatnonzero(~at_home).tolist()
        self._lookahead.read(epochs.entries, [row_list[index] for index in away], tokens=False)
        self._lookahead.read(epochs.entries, row_list if not away else row_addresses[at_home].tolist())
        tables = []
        for entry, epoch, pool, row in row_list:
            packed = self.pool(epochs, (entry, epoch, pool))
            tables.append(packed.pieces[packed.firsts[row] : packed.pasts[row]])
        self._lookahead.fetch([tables[index] for index in away])
        return tables

    def spans(self, epochs: CorpusEpochs, pool_key: PoolKey) -> PoolSpans | None:
        """Return the memory spans of a pool; None if some of it is not in memory maps.

        Args:
            pool_key: entry, epoch and number of the pool.
        """
        if self.is_far or (compiled := library()) is None:
            return None
        key = (epochs.entries[pool_key[0]].identity, *pool_key[1:])
        with self._lock:
            if key in self._spans:
                spans = self._spans[key] = self._spans.pop(key)
                return spans
        packed = self.pool(epochs, pool_key)
        with self._lock:
            if key not in self._spans:
                while len(self._spans) >= self._most_kept(epochs, pool_key):
                    oldest = next(iter(self._spans))
                    self._spans.pop(oldest)
                    self._fresh.discard(oldest)
                self._spans[key] = spans_of(compiled, packed, self.corpus)
                if self._spans[key] is not None:
                    self._fresh.add(key)
            return self._spans[key]

    def read_ahead(self, epochs: CorpusEpochs, pool_key: PoolKey) -> None:
        """Ask the system to read ahead a freshly packed pool of local files; does not wait.

        One page fault after another is slow on a disk. A large pool is not read ahead as a whole.

        Args:
            pool_key: entry, epoch and number of the pool.
        """
        entry, epoch, pool = pool_key
        of, key = epochs.entries[entry], (epochs.entries[entry].identity, epoch, pool)
        if key not in self._fresh or (compiled := library()) is None:
            return
        self._fresh.discard(key)
        if self._skips_left:
            self._skips_left -= 1
            return
        ranges = []
        for index, low, high in self.corpus.spans(of.space.in_corpus(of.order.blocks.of_pool(epoch, pool))):
            tokens = self.corpus.shard(index).tokens
            if (
                isinstance(tokens, np.ndarray)
                and of.order.geometry.pool_tokens * tokens.itemsize <= _AHEAD_BYTES
            ):
                ranges.append((address(tokens) + low * tokens.itemsize, (high - low) * tokens.itemsize))
        requested = np.array(ranges, dtype=np.int64)
        if not compiled.penstock_read_ahead(address(requested), len(ranges)):
            self._skips_left = _CHECK_EVERY - 1

    def pool(self, epochs: CorpusEpochs, pool_key: PoolKey) -> PackedPool:
        """Return a packed pool from the cache, or pack it; the cache holds this rank's lanes and a few more.

        Args:
            pool_key: entry, epoch and number of the pool.
        """
        # Keyed by the entry's identity, not its index: after a change of the run another entry has that
        # index.
        key = (epochs.entries[pool_key[0]].identity, *pool_key[1:])
        with self._lock:
            packed = self._pools.pop(key, None) or self._packed(epochs, pool_key)
            while len(self._pools) >= self._most_kept(epochs, pool_key):
                self._pools.pop(next(iter(self._pools)))
            self._pools[key] = packed
            return packed

    def _packed(self, epochs: CorpusEpochs, pool_key: PoolKey) -> PackedPool:
        entry, epoch, pool = pool_key
        of = epochs.entries[entry]
        repacks = of.repacks(pool)
        if isinstance(pools := of.order.counter, WholePools):
            return pools.pack(of.order, epoch=epoch, pool=pool, repacks=repacks)
        return pack_pool(of.space, of.order, epoch=epoch, pool=pool, rule=self._rule, repacks=repacks)

    def _most_kept(self, epochs: CorpusEpochs, pool_key: PoolKey) -> int:
        """Return the size of the pool cache: this rank's lanes, one upcoming pool, a few of other ranks."""
        lanes = epochs.entries[pool_key[0]].order.geometry.lanes
        return min(lanes + 1, -(-lanes // self._ranks) + 1 + _AWAY_KEPT)


def open_sources(
    corpora: Mapping[str, str | Path],
    *,
    rule: str,
    overlong: str | None,
    epochs: Mapping[str, int],
    ranks: int,
    columns: Mapping[str, str | Path],
) -> dict[str, CorpusReader]:
    """Open every corpus of a mixture that `ranks` ranks read together; other arguments as for `Loader`.

    Raises:
        ConfigError: no corpus is named, or an argument is out of range or names no corpus.
        CorpusError: a corpus is missing or damaged.
    """
    if not isinstance(corpora, Mapping):
        raise ConfigError(
            "corpora must map names to folders", got=corpora, fix="Write {'web': 'path/to/corpus'}."
        )
    if not corpora:
        raise ConfigError("The loader needs at least one corpus", fix="Name one: {'web': 'path/to/corpus'}.")
    for name in corpora:
        check_name(name)
    check_packing(rule, overlong)
    for name, cap in check_table("epochs", epochs, example="{'web': 2}").items():
        if name not in corpora:
            raise ConfigError("epochs names an unknown corpus", got=name, fix=nearest(name, list(corpora)))
        at_least(1, f"epochs of corpus {name!r}", cap)
    readers = {
        name: CorpusReader(
            name, path, rule=rule, max_epochs=epochs.get(name), ranks=ranks, columns=columns.get(name)
        )
        for name, path in corpora.items()
    }
    growing = [name for name, of in readers.items() if of.corpus.manifest.streamed_parts is not None]
    if rule in PADDING_RULES and overlong is None and growing:
        raise overlong_unset(
            f"Corpus {growing[0]!r} is prepared during the run, and its documents may be longer than a row"
        )
    return readers


def check_name(name: str) -> None:
    """Refuse a corpus name that is not a non-empty string (names are JSON keys in the state)."""
    if not (isinstance(name, str) and name):
        raise ConfigError("The name of a corpus must be a non-empty string", got=name)

"""One corpus of a mixture: where its rows are, read through a cache of packed pools."""

from pathlib import Path
from threading import Lock

from penstock.core import clock
from penstock.core.errors import CorpusError, CorpusExhausted
from penstock.data.lookahead import Lookahead
from penstock.data.opening import open_corpus
from penstock.data.pool import PackedPool, pack_pool
from penstock.data.types import Int64, Table
from penstock.data.way import Way
from penstock.data.whole_pool import WholePools

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two looks at a manifest, which may be far away


class Source:
    """Rows of one corpus by their place on its way.

    Args:
        name: the corpus's name in the mixture.
        path: where it is, as `open_corpus` takes it.
        rule: packing rule, a name in PACKERS.
        max_epochs: samples beyond so many epochs are refused; None for no cap.
        wait_seconds: how long to wait for the next part of a corpus that is still being prepared.
    """

    def __init__(
        self,
        name: str,
        path: str | Path,
        *,
        rule: str,
        max_epochs: int | None,
        wait_seconds: float = 600.0,
    ) -> None:
        self.name = name
        self.path = path
        self.corpus = open_corpus(path)
        self.max_epochs = max_epochs
        self._rule = rule
        self._wait_seconds = wait_seconds
        self._pools: dict[tuple[str, int, int], PackedPool] = {}
        self._lock = Lock()
        self._lookahead = Lookahead(self.corpus, max_epochs=max_epochs)

    def reopen(self) -> None:
        """Read the corpus's manifest again."""
        self.corpus = open_corpus(self.path)
        self._lookahead = Lookahead(self.corpus, max_epochs=self.max_epochs)

    @property
    def appended(self) -> int:
        """Parts of a corpus that was streamed and then appended to; 0: of one that was not both."""
        manifest = self.corpus.manifest
        return 0 if manifest.streamed_parts is None else manifest.adoptable_parts

    def check_supply(self, way: Way, last: int) -> None:
        """Refuse a sample of a way that lies beyond the cap on epochs.

        Raises:
            CorpusExhausted: with what the corpus has given.
        """
        if not self.supplies(way, last):
            assert self.max_epochs is not None
            supply = way.max_samples(self.max_epochs)
            raise CorpusExhausted(
                f"Corpus {self.name!r} has given all {supply:,} sequences of its {self.max_epochs} epochs",
                fix="Train for fewer steps, raise its epochs, or give it a smaller weight.",
            )

    def supplies(self, way: Way, last: int) -> bool:
        """Return whether a sample of a way lies within the cap on epochs."""
        supply = None if self.max_epochs is None else way.max_samples(self.max_epochs)
        return supply is None or last < supply

    def reach(self, way: Way, sample: int) -> Way:
        """Return a way that holds a sample: that of a corpus still being prepared grows, if need be in time.

        Raises:
            CorpusError: no further part came in time, or its preparation failed.
        """
        while way.ends is not None and sample >= way.ends:
            finished = self.corpus.manifest.streamed_parts
            known = finished or len(self.corpus.manifest.part_ends)
            if way.parts < known:
                way = way.streamed(self.corpus, known)
            elif finished:
                way = way.finished(self.corpus)
            else:
                self.wait_for(way.parts + 1)
        return way

    def wait_for(self, parts: int) -> None:
        """Wait until a corpus that is being prepared has so many parts, or will get no more.

        Raises:
            CorpusError: no further part came in time, or its preparation failed.
        """
        end, pause = clock.monotonic() + self._wait_seconds, _FIRST_PAUSE_S
        while self.corpus.manifest.streamed_parts == 0 and len(self.corpus.manifest.part_ends) < parts:
            if clock.monotonic() > end:
                raise CorpusError(
                    f"Corpus {self.name!r} is being prepared and gave no part in {self._wait_seconds:.0f} s",
                    fix="Start its preparation again, or wait for it and resume.",
                )
            clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            before = len(self.corpus.manifest.part_ends)
            self.reopen()
            # What this process keeps going has no time limit: an error would be raised on reopening.
            if self.corpus.preparation is not None or len(self.corpus.manifest.part_ends) > before:
                end = clock.monotonic() + self._wait_seconds

    def rows(self, way: Way, places: Int64) -> list[Table]:
        """Return the piece tables of rows: n arrays of pieces as in PackedPool.

        Args:
            places: [n, 4] leg, epoch, pool, row.
        """
        told = places.tolist()
        self._lookahead.read(way.legs, told)
        tables, legs, pools = [], [leg.identity for leg in way.legs], self._pools
        for leg, epoch, pool, row in told:
            packed = pools.get((legs[leg], epoch, pool)) or self.pool(way, (leg, epoch, pool))
            tables.append(packed.pieces[packed.firsts[row] : packed.pasts[row]])
        return tables

    def pool(self, way: Way, place: tuple[int, int, int]) -> PackedPool:
        """Pack a pool, once; as many are kept as there are lanes, the oldest goes first.

        Args:
            place: leg, epoch and number of the pool.
        """
        leg, epoch, pool = place
        of = way.legs[leg]
        # By what a leg is and not where it stands: after a change another one stands there.
        key = (of.identity, epoch, pool)
        with self._lock:
            if key not in self._pools:
                cuts = of.cuts(pool)
                if isinstance(pools := of.order.counter, WholePools):
                    packed = pools.pack(of.order, epoch=epoch, pool=pool, cuts=cuts)
                else:
                    packed = pack_pool(of.space, of.order, epoch=epoch, pool=pool, rule=self._rule, cuts=cuts)
                while len(self._pools) > of.order.geometry.lanes:
                    self._pools.pop(next(iter(self._pools)))
                self._pools[key] = packed
            return self._pools[key]

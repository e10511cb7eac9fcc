"""Global sample id -> corpus and row address, over every change of a run.

Within a phase (see segments.py) each corpus follows one epoch schedule (see epochs.py), built on first use. A
change of the sequence length starts a schedule that continues where the previous one ended.

In a large mixture nearly every corpus has one endless entry of full rows. FullEpochsTable computes the
addresses of samples of a thousand such corpora with a few array operations; one by one they would take about
20 us each. Other corpora (grown, changed in length, rows counted) take the path through CorpusEpochs.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.arrays import Bool, Int64, Table
from penstock.core.errors import ConfigError, CorpusError, UsageError
from penstock.data.order.epochs import CorpusEpochs, FullEpochs, OrderConfig, RemainderEpoch, begin
from penstock.data.order.pool import PackedPool
from penstock.data.order.row_order import RowAddresses
from penstock.data.row_spans import PoolKey, PoolSpans
from penstock.data.schedule.change_log import ChangeLog
from penstock.data.schedule.segments import Located, ScheduleSegments
from penstock.data.types import MAX_SAMPLES, Waste

if TYPE_CHECKING:
    from penstock.data.corpus.corpus import Corpus
    from penstock.data.corpus_reader import CorpusReader

_ROUNDED = 6  # digits of a number of rows: 0.1 epochs of 30 rows are 3
_FEW = 8  # corpora of a batch; up to this number they are located one by one


class FullEpochsTable:
    """Closed-form row addresses of all corpora whose schedule is one endless entry of full rows."""

    def __init__(self, num_corpora: int) -> None:
        self._known = np.zeros(num_corpora, dtype=np.bool_)
        self._numbers = np.ones((8, num_corpora), dtype=np.int64)
        self._numbers[_SUPPLY] = 0  # for a corpus that is not covered

    def unknown(self, corpora: Int64) -> list[int]:
        """Return those of the given corpora that are not in the table yet."""
        found: list[int] = corpora[~self._known[corpora]].tolist()
        return found

    def learn(self, corpus: int, epochs: CorpusEpochs, *, supply: int | None) -> None:
        """Enter a corpus into the table; it stays uncovered unless its only entry is endless and uncounted.

        Args:
            supply: samples within its cap on epochs; None: no cap.
        """
        self._known[corpus] = True
        entry = epochs.entries[0] if len(epochs.entries) == 1 else None
        if not isinstance(entry, FullEpochs) or entry.epochs is not None or entry.order.counter is not None:
            return
        order, geometry, last = entry.order, entry.order.geometry, entry.order.num_pools - 1
        self._numbers[:, corpus] = (
            entry.first * order.samples_per_epoch,
            order.samples_per_epoch,
            geometry.lanes,
            geometry.rows_per_pool,
            last // geometry.lanes,
            last % geometry.lanes + 1,
            order.rows_in_pool(last),
            _NO_END if supply is None else supply,
        )

    def covers(self, corpora: Int64, turns: Int64) -> Bool:
        """Return True where the corpora's own samples [n] can be computed here and are within the caps."""
        covered: Bool = turns < self._numbers[_SUPPLY, corpora]
        return covered

    def addresses(self, corpora: Int64, turns: Int64) -> RowAddresses:
        """Return the addresses of the corpora's own samples [n], all of which must be covered."""
        first, epoch_rows, lanes, rows, last_group, last_lanes, last_rows, _ = self._numbers[:, corpora]
        epoch, k = np.divmod(turns + first, epoch_rows)
        group, inside = np.divmod(k, lanes * rows)
        is_last = group == last_group
        row, lane = np.divmod(inside, np.where(is_last, last_lanes, lanes))
        # The last pool may be short. After its last row the round robin goes on with the other lanes of its
        # group.
        alone = np.flatnonzero(is_last & (row >= last_rows))
        remainder, others = inside[alone] - (last_rows * last_lanes)[alone], last_lanes[alone] - 1
        row[alone], lane[alone] = last_rows[alone] + remainder // others, remainder % others
        return RowAddresses(epoch=epoch, pool=group * lanes + lane, lane=lane, row=row)


class SampleIndex:
    """Lookup from sample ids to corpora and row addresses, for one change log. Thread-safe.

    Corpora are numbered in the order in which the change log first names them: the rows of a batch are in
    that order, also after a resume that names the corpora in another order.

    Args:
        sources: corpora by name. One that the change log names and that is missing here can be counted, not
            read.
        plans: shuffle key and sizes of each corpus at the first sequence length, by name.
    """

    def __init__(
        self, change_log: ChangeLog, sources: "Mapping[str, CorpusReader]", plans: Mapping[str, OrderConfig]
    ) -> None:
        named = [name for _, slots, _ in change_log.mix for name in slots]
        self.names = list(dict.fromkeys([*named, *sources]))
        self.change_log = change_log
        self.sources = sources
        self._plans = plans
        self._index = {name: index for index, name in enumerate(self.names)}
        self._segments = ScheduleSegments(change_log, self._index)
        self._epochs: list[dict[int, CorpusEpochs]] = [{} for _ in self._segments.lengths]
        self._tables = [FullEpochsTable(len(self.names)) for _ in self._segments.lengths]
        self._extending = Lock()

    def length(self, phase: int) -> int:
        """Return the sequence length of a phase."""
        return self._segments.lengths[phase]

    def phase_of(self, sample: int) -> int:
        """Return the phase of a sample id."""
        return self._segments.phase_of(sample)

    def locate(self, samples: Int64) -> Located:
        """Return the corpus and the corpus's own sample of each sample id [n].

        Raises:
            UsageError: the samples have different sequence lengths.
        """
        located = self._segments.locate(samples)
        if located is None:
            raise UsageError(
                "The samples have different sequence lengths",
                got=sorted({self.length(self.phase_of(sample)) for sample in samples.tolist()}),
                fix="Request samples of one length at a time.",
            )
        return located

    def holds(self, located: Located) -> bool:
        """Return True if the samples can be read now: no corpus is missing, exhausted or in preparation."""
        last = np.full(len(self.names), -1)
        np.maximum.at(last, located.corpus, located.turn)
        corpora = np.flatnonzero(last >= 0)
        if len(corpora) > _FEW:
            corpora = corpora[~self._full_epochs_table(located.phase, corpora).covers(corpora, last[corpora])]
        for corpus in corpora.tolist():
            if self.names[corpus] not in self.sources:
                return False
            epochs, source = self._epochs_of(corpus, located.phase), self._source(corpus)
            if epochs.ends is not None and last[corpus] >= epochs.ends:
                return False
            if not source.supplies(epochs, int(last[corpus])):
                return False
        return True

    def epochs(self, corpus: int, phase: int, *, last: int) -> CorpusEpochs:
        """Return the epoch schedule of a corpus in a phase, extended to its sample `last` at least.

        Raises:
            CorpusExhausted: the sample is beyond the cap on epochs.
            CorpusError: the corpus is not open; or it is being prepared, and no part was finished in time.
        """
        epochs, source = self._epochs_of(corpus, phase), self._source(corpus)
        if epochs.ends is not None and last >= epochs.ends:
            with self._extending:  # or another thread could replace a longer schedule by a shorter one
                epochs = self._epochs[phase][corpus] = source.extended_to(self._epochs[phase][corpus], last)
        source.check_supply(epochs, last)
        return epochs

    def addresses(self, located: Located) -> tuple[Int64, RowAddresses]:
        """Return the entry [n] of the epoch schedule and the row addresses of located samples."""
        if len(self.names) == 1:  # the most frequent case: a numpy call costs microseconds
            epochs = self.epochs(0, located.phase, last=int(located.turn.max()))
            if len(epochs.entries) == 1:
                return np.zeros_like(located.turn), epochs.entries[0].locate(located.turn)
        entries = np.zeros_like(located.turn)
        addresses = RowAddresses(*(np.empty_like(located.turn) for _ in range(4)))
        corpora = np.unique(located.corpus)
        if len(corpora) > _FEW:
            table = self._full_epochs_table(located.phase, corpora)
            covered = table.covers(located.corpus, located.turn)
            if covered.all():
                return entries, table.addresses(located.corpus, located.turn)
            addresses.put(
                np.flatnonzero(covered), table.addresses(located.corpus[covered], located.turn[covered])
            )
            corpora = np.unique(located.corpus[~covered])
        for corpus in corpora.tolist():
            chosen = np.flatnonzero(located.corpus == corpus)
            turns = located.turn[chosen]
            epochs = self.epochs(corpus, located.phase, last=int(turns.max()))
            entries[chosen] = np.searchsorted(epochs.firsts, turns, side="right") - 1
            for entry in np.unique(entries[chosen]).tolist():
                some = chosen[entries[chosen] == entry]
                addresses.put(
                    some,
                    epochs.entries[entry].locate(located.turn[some] - epochs.firsts[entry]),
                )
        return entries, addresses

    def counts(self, sample: int) -> dict[str, int]:
        """Return how many sample ids below `sample` each corpus has, by name."""
        totals = self._segments.totals(sample)
        return {name: totals.get(index, 0) for index, name in enumerate(self.names)}

    def waste(self, sample: int) -> dict[str, Waste]:
        """Return the waste of the sample ids below `sample`, for each open corpus."""
        wasted = {}
        for name, source in self.sources.items():
            corpus, of = self._index[name], Waste()
            for phase, taken in enumerate(self._segments.taken_before(sample)):
                samples = taken.get(corpus, 0)  # 0 too: a length change alone may leave documents out
                of += source.extended_to(self._epochs_of(corpus, phase), samples - 1).waste(samples)
            wasted[name] = of
        return wasted

    def repacked(self, phase: int) -> dict[str, tuple[int, int]]:
        """Return (repacked rows, padding in them) of the length change that began a phase, by corpus."""
        repacked = {}
        for name in self.sources:
            entries = self._epochs_of(self._index[name], phase).entries
            if entries and isinstance(remainder := entries[0], RemainderEpoch) and remainder.repacked_rows:
                repacked[name] = remainder.repacked_rows, remainder.waste(remainder.repacked_rows).padding
        return repacked

    def num_lanes(self, corpora: Int64, phase: int, addresses: Int64) -> Int64:
        """Return the number of lanes at row addresses [n, 4] (entry, epoch, pool, row) of corpora [n]."""
        num_lanes = np.empty_like(corpora)
        for corpus in np.unique(corpora).tolist():
            chosen = corpora == corpus
            by_entry = [entry.order.geometry.lanes for entry in self._epochs_of(corpus, phase).entries]
            num_lanes[chosen] = np.array(by_entry)[addresses[chosen, 0]]
        return num_lanes

    def attention_pairs(
        self, corpora: Int64, phase: int, addresses: Int64, *, at_home: Bool | None = None
    ) -> Int64:
        """Return the attention pairs (see pool.py) of rows at addresses [n, 4] of corpora [n]."""
        pairs = np.empty_like(corpora)
        for corpus in np.unique(corpora).tolist():
            chosen = corpora == corpus
            pairs[chosen] = self._source(corpus).attention_pairs(
                self._epochs_of(corpus, phase),
                addresses[chosen],
                at_home=None if at_home is None else at_home[chosen],
            )
        return pairs

    def rows(
        self, corpus: int, phase: int, addresses: Int64, *, at_home: Bool | None = None
    ) -> "tuple[CorpusReader, list[Table]]":
        """Return a corpus and the piece tables of its rows; see CorpusReader.rows."""
        source = self._source(corpus)
        return source, source.rows(self._epochs_of(corpus, phase), addresses, at_home=at_home)

    def spans(self, corpus: int, phase: int, pool_key: PoolKey) -> PoolSpans | None:
        """Return the memory spans of a pool (entry, epoch, pool); None if it is not in memory maps."""
        return self._source(corpus).spans(self._epochs_of(corpus, phase), pool_key)

    def read_ahead(self, corpus: int, phase: int, pool_key: PoolKey) -> None:
        """Ask the system to read a pool (entry, epoch, pool) of local files ahead."""
        self._source(corpus).read_ahead(self._epochs_of(corpus, phase), pool_key)

    def samples_per_epoch(self, step: int) -> dict[str, int]:
        """Return the rows of one epoch of each corpus, at the sequence length of a step.

        A corpus still being prepared counts with its first part; one that was streamed, with all its parts.
        """
        ends = {name: source.corpus.manifest.streamed_parts or 1 for name, source in self.sources.items()}
        return self._rows(step, ends)

    def first_rows(self, step: int) -> dict[str, int]:
        """Return `samples_per_epoch`, but of streamed corpora the first part's rows: equal on all ranks."""
        return self._rows(step, dict.fromkeys(self.sources, 1))

    def _rows(self, step: int, parts: Mapping[str, int]) -> dict[str, int]:
        """Return the rows of one epoch of each corpus; of streamed ones, the first `parts[name]` parts."""
        phase = self.phase_of(self.change_log.first_sample(step))
        rows = {}
        for name, source in self.sources.items():
            epochs = self._epochs_of(self._index[name], phase)
            if epochs.plan.streamed:
                rows[name] = begin(epochs.plan, source.corpus).streamed(source.corpus, parts[name]).firsts[-1]
            else:
                rows[name] = epochs.entries[-1].order.samples_per_epoch
        return rows

    def parts_begun(self, name: str, step: int) -> int:
        """Return how many parts of a streamed corpus were begun before a step."""
        corpus, first = self._index[name], self.change_log.first_sample(step)
        segment = self._segments.all[self._segments.number_of(first - 1)]
        taken = segment.plus(segment.before, first).get(corpus, 0)
        epochs = self.sources[name].extended_to(self._epochs_of(corpus, segment.phase), taken - 1)
        return epochs.parts_begun(taken)

    def supply(self) -> int | None:
        """Return the first sample id beyond a corpus's cap on epochs; None if there is no cap."""
        ends = [self._ends(self._index[name], source) for name, source in self.sources.items()]
        return min((end for end in ends if end is not None), default=None)

    def end_of_epochs(self, epochs: float) -> int:
        """Return the first sample id after `epochs` passes over the rows of all corpora together.

        Raises:
            ConfigError: a corpus is still being prepared.
        """
        for name, source in self.sources.items():
            if source.corpus.manifest.streamed_parts == 0:
                raise ConfigError(
                    f"Corpus {name!r} is still being prepared, so its rows are not counted yet",
                    fix="Give a number of steps, or wait for `penstock data prepare`.",
                )
        starts = [step for step, _ in self.change_log.lengths]
        end = 0
        for phase, start in enumerate(starts):
            first = self.change_log.first_sample(start)
            left = sum(
                source.extended_to(self._epochs_of(self._index[name], phase), MAX_SAMPLES).samples_of_epochs(
                    epochs
                )
                for name, source in self.sources.items()
            )
            end = first + max(0, math.ceil(round(left, _ROUNDED)))
            if phase + 1 < len(starts) and end <= self.change_log.first_sample(starts[phase + 1]):
                break
        return end

    def sample_of(self, corpus: int, phase: int, turn: int) -> int | None:
        """Return the sample id of a corpus's own sample in a phase; None if the run never served it."""
        return self._segments.sample_of(corpus, phase, turn)

    def corpus(self, corpus: int) -> "Corpus":
        """Return a corpus by its index."""
        return self._source(corpus).corpus

    def pool(self, corpus: int, phase: int, pool_key: PoolKey) -> PackedPool:
        """Return a packed pool of a corpus by (entry, epoch, pool)."""
        return self._source(corpus).pool(self._epochs_of(corpus, phase), pool_key)

    def taken(self, corpus: int, steps: range) -> list[range]:
        """Return the corpus's own samples in some steps: a range for each phase.

        Skipped samples are included, except those beyond the cap on epochs.
        """
        first, past = self.change_log.first_sample(steps.start), self.change_log.first_sample(steps.stop)
        ranges = self._segments.ranges(corpus, first, past)
        cap = self._source(corpus).max_epochs
        for phase, turns in enumerate(ranges):
            end = self._epochs_of(corpus, phase).max_samples(cap) if cap is not None and turns else None
            if end is not None:
                ranges[phase] = range(turns.start, min(turns.stop, end))
        return ranges

    def _source(self, corpus: int) -> "CorpusReader":
        name = self.names[corpus]
        if name not in self.sources:
            raise CorpusError(
                f"Corpus {name!r} was removed from the run and is not open, so it cannot be read",
                fix="Name it in corpora to read steps from before its removal.",
            )
        return self.sources[name]

    def _epochs_of(self, corpus: int, phase: int) -> CorpusEpochs:
        if corpus not in self._epochs[phase]:
            for number in range(phase + 1):
                if corpus not in self._epochs[number]:
                    self._epochs[number].setdefault(corpus, self._begun(corpus, number))
        return self._epochs[phase][corpus]

    def _full_epochs_table(self, phase: int, corpora: Int64) -> FullEpochsTable:
        """Return the table of a phase, with the given corpora entered if they are open."""
        table = self._tables[phase]
        for corpus in table.unknown(corpora):
            if self.names[corpus] in self.sources:
                epochs, cap = self._epochs_of(corpus, phase), self._source(corpus).max_epochs
                table.learn(corpus, epochs, supply=None if cap is None else epochs.max_samples(cap))
        return table

    def _begun(self, corpus: int, phase: int) -> CorpusEpochs:
        """Return the first epoch schedule of a corpus in a phase; the phase before must have one."""
        source, length = self._source(corpus), self.length(phase)
        if phase:
            taken = self._segments.taken[phase - 1].get(corpus, 0)
            epochs = source.extended_to(self._epochs[phase - 1][corpus], taken - 1).at_length(taken, length)
        else:
            epochs = begin(replace(self._plans[source.name], sequence_length=length), source.corpus)
        for grown, taken, parts in self._segments.grown[phase]:
            if grown == corpus:
                # Only a finished corpus can be appended to, so its schedule can be extended to the endless
                # entry.
                epochs = source.extended_to(epochs, MAX_SAMPLES).grown(taken, source.corpus, parts)
        return epochs

    def _ends(self, corpus: int, source: "CorpusReader") -> int | None:
        """Return the first sample id beyond a corpus's cap on epochs; None if unknown or without a cap."""
        if source.max_epochs is None:
            return None
        for number, segment in enumerate(self._segments.all):
            supply = self._epochs_of(corpus, segment.phase).max_samples(source.max_epochs)
            if supply is None:
                return None  # still being prepared, so its end is not known yet
            end = self._segments.first_served(number, corpus, supply)
            if end is not None:
                return end
        return None


_FIRST, _EPOCH, _LANES, _ROWS, _LAST_GROUP, _LAST_LANES, _LAST_ROWS, _SUPPLY = range(8)
_NO_END = 2**63 - 1

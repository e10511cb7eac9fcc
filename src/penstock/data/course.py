"""Global sample ids -> corpus and place, over everything that changed during a run.

Within a phase (see stretches.py) each corpus goes along one way (see way.py), made when it is first needed: a
change of length starts the next way where the last one stood.
"""

from collections.abc import Mapping
from dataclasses import replace
from threading import Lock

import numpy as np

from penstock.core.errors import CorpusError, UsageError
from penstock.data.corpus import Corpus
from penstock.data.even_ways import EvenWays
from penstock.data.legs import Rest
from penstock.data.order import Places
from penstock.data.pool import PackedPool
from penstock.data.source import Source
from penstock.data.stretches import Located, Stretches
from penstock.data.timeline import MOST_SAMPLES, Timeline
from penstock.data.types import Int64, Table, Waste
from penstock.data.way import Plan, Way, begin

_FEW = 8  # corpora in a batch: fewer are located one by one


class Course:
    """What a timeline makes of a set of corpora. Thread-safe.

    Corpora are numbered as the timeline names them first: the rows of a batch lie in that order, after a
    resume too, in whatever order the corpora are then given.

    Args:
        sources: by name. A corpus that the timeline names and that is not here can be counted but not read.
        plans: by name; how each corpus's order is keyed and sized at the first length.
    """

    def __init__(self, timeline: Timeline, sources: Mapping[str, Source], plans: Mapping[str, Plan]) -> None:
        told = [name for _, slots, _ in timeline.mix for name in slots]
        self.names = list(dict.fromkeys([*told, *sources]))
        self.timeline = timeline
        self._sources = sources
        self._plans = plans
        self._index = {name: index for index, name in enumerate(self.names)}
        self._stretches = Stretches(timeline, self._index)
        self._ways: list[dict[int, Way]] = [{} for _ in self._stretches.lengths]
        self._even = [EvenWays(len(self.names)) for _ in self._stretches.lengths]
        self._reaching = Lock()

    def length(self, phase: int) -> int:
        """Return the sequence length of a phase."""
        return self._stretches.lengths[phase]

    def phase_of(self, sample: int) -> int:
        """Return the phase of a sample id."""
        return self._stretches.phase_of(sample)

    def locate(self, samples: Int64) -> Located:
        """Return whose samples [n] are.

        Raises:
            UsageError: they are of different sequence lengths.
        """
        located = self._stretches.locate(samples)
        if located is None:
            raise UsageError(
                "The samples are of different sequence lengths",
                got=sorted({self.length(self.phase_of(sample)) for sample in samples.tolist()}),
                fix="Take those of one length at a time.",
            )
        return located

    def holds(self, located: Located) -> bool:
        """Return whether located samples can be read at once: nothing is waited for, absent or used up."""
        last = np.full(len(self.names), -1)
        np.maximum.at(last, located.corpus, located.turn)
        corpora = np.flatnonzero(last >= 0)
        if len(corpora) > _FEW:
            corpora = corpora[~self._even_ways(located.phase, corpora).covers(corpora, last[corpora])]
        for corpus in corpora.tolist():
            if self.names[corpus] not in self._sources:
                return False
            way, source = self._way(corpus, located.phase), self._source(corpus)
            if way.ends is not None and last[corpus] >= way.ends:
                return False
            if not source.supplies(way, int(last[corpus])):
                return False
        return True

    def way(self, corpus: int, phase: int, *, last: int) -> Way:
        """Return a corpus's way in a phase, reaching to one of its samples at least.

        Raises:
            CorpusExhausted: the sample is beyond the cap on epochs.
            CorpusError: the corpus is not here; or it is being prepared, and no part came in time.
        """
        way, source = self._way(corpus, phase), self._source(corpus)
        if way.ends is not None and last >= way.ends:
            with self._reaching:  # or a thread that came less far could put its way in place of a longer one
                way = self._ways[phase][corpus] = source.reach(self._ways[phase][corpus], last)
        source.check_supply(way, last)
        return way

    def places(self, located: Located) -> tuple[Int64, Places]:
        """Return the leg [n] and the places of located samples."""
        if len(self.names) == 1:  # by far the most frequent case, and each call of numpy costs microseconds
            way = self.way(0, located.phase, last=int(located.turn.max()))
            if len(way.legs) == 1:
                return np.zeros_like(located.turn), way.legs[0].locate(located.turn)
        legs = np.zeros_like(located.turn)
        places = Places(*(np.empty_like(located.turn) for _ in range(4)))
        corpora = np.unique(located.corpus)
        if len(corpora) > _FEW:
            even = self._even_ways(located.phase, corpora)
            covered = even.covers(located.corpus, located.turn)
            if covered.all():
                return legs, even.places(located.corpus, located.turn)
            places.put(np.flatnonzero(covered), even.places(located.corpus[covered], located.turn[covered]))
            corpora = np.unique(located.corpus[~covered])
        for corpus in corpora.tolist():
            chosen = np.flatnonzero(located.corpus == corpus)
            turns = located.turn[chosen]
            way = self.way(corpus, located.phase, last=int(turns.max()))
            legs[chosen] = np.searchsorted(way.firsts, turns, side="right") - 1
            for leg in np.unique(legs[chosen]).tolist():
                some = chosen[legs[chosen] == leg]
                places.put(some, way.legs[leg].locate(located.turn[some] - way.firsts[leg]))
        return legs, places

    def counts(self, sample: int) -> dict[str, int]:
        """Return how many samples of each corpus have an id below a sample's."""
        totals = self._stretches.totals(sample)
        return {name: totals.get(index, 0) for index, name in enumerate(self.names)}

    def waste(self, sample: int) -> dict[str, Waste]:
        """Return what the samples with an id below a sample's waste, of each corpus that is here."""
        wasted = {}
        for name, source in self._sources.items():
            corpus, of = self._index[name], Waste()
            for phase, taken in enumerate(self._stretches.taken_before(sample)):
                samples = taken.get(corpus, 0)  # of none, too: a change alone may leave documents out
                of += source.reach(self._way(corpus, phase), samples - 1).waste(samples)
            wasted[name] = of
        return wasted

    def recut(self, phase: int) -> dict[str, tuple[int, int]]:
        """Return, by corpus, the rows that the change to a phase cut anew, and the padding in them."""
        recut = {}
        for name in self._sources:
            legs = self._way(self._index[name], phase).legs
            if legs and isinstance(rest := legs[0], Rest) and rest.recut:
                recut[name] = rest.recut, rest.waste(rest.recut).padding
        return recut

    def rows(self, corpus: int, phase: int, places: Int64) -> tuple[Source, list[Table]]:
        """Return a corpus and the piece tables of its rows at places [n, 4]: leg, epoch, pool, row."""
        source = self._source(corpus)
        return source, source.rows(self._way(corpus, phase), places)

    def samples_per_epoch(self, step: int) -> dict[str, int]:
        """Return the rows of one pass over each corpus, at the sequence length of a step.

        Of a corpus that is being prepared, those of its first part; of one that was, those of all parts.
        """
        ends = {name: source.corpus.manifest.streamed_parts or 1 for name, source in self._sources.items()}
        return self._rows(step, ends)

    def first_rows(self, step: int) -> dict[str, int]:
        """Return the same, but of any streamed corpus the rows of its first part: equal on all ranks."""
        return self._rows(step, dict.fromkeys(self._sources, 1))

    def _rows(self, step: int, parts: Mapping[str, int]) -> dict[str, int]:
        """Return the rows of one pass over each corpus, over so many parts of those that are streamed."""
        phase = self.phase_of(self.timeline.first_sample(step))
        rows = {}
        for index, (name, source) in enumerate(self._sources.items()):
            way = self._way(index, phase)
            if way.plan.streamed:
                rows[name] = begin(way.plan, source.corpus).streamed(source.corpus, parts[name]).firsts[-1]
            else:
                rows[name] = way.legs[-1].order.samples_per_epoch
        return rows

    def parts_begun(self, name: str, step: int) -> int:
        """Return how many parts of a streamed corpus were begun before a step."""
        corpus, first = self._index[name], self.timeline.first_sample(step)
        stretch = self._stretches.all[self._stretches.number_of(first - 1)]
        taken = stretch.plus(stretch.before, first).get(corpus, 0)
        way = self._sources[name].reach(self._way(corpus, stretch.phase), taken - 1)
        return way.parts_begun(taken)

    def supply(self) -> int | None:
        """Return the first sample id that a capped corpus cannot give, or None where none is capped."""
        ends = [self._ends(self._index[name], source) for name, source in self._sources.items()]
        return min((end for end in ends if end is not None), default=None)

    def sample_of(self, corpus: int, phase: int, turn: int) -> int | None:
        """Return the sample id that is a corpus's own sample of a phase; None where it never came to that."""
        return self._stretches.sample_of(corpus, phase, turn)

    def corpus(self, corpus: int) -> Corpus:
        """Return a corpus by its index."""
        return self._source(corpus).corpus

    def pool(self, corpus: int, phase: int, place: tuple[int, int, int]) -> PackedPool:
        """Return a pool of a corpus by leg, epoch and number."""
        return self._source(corpus).pool(self._way(corpus, phase), place)

    def taken(self, corpus: int, steps: range) -> list[range]:
        """Return which own samples of a corpus some steps take: a range for each phase.

        Skipped ones are among them, but none beyond the cap on epochs, which only skipped ones may be.
        """
        first, past = self.timeline.first_sample(steps.start), self.timeline.first_sample(steps.stop)
        ranges = self._stretches.ranges(corpus, first, past)
        cap = self._source(corpus).max_epochs
        for phase, turns in enumerate(ranges):
            end = self._way(corpus, phase).max_samples(cap) if cap is not None and turns else None
            if end is not None:
                ranges[phase] = range(turns.start, min(turns.stop, end))
        return ranges

    def _source(self, corpus: int) -> Source:
        name = self.names[corpus]
        if name not in self._sources:
            raise CorpusError(
                f"Corpus {name!r}, which was taken out of the run, is not here to be read",
                fix="To read steps from before that, name it in corpora.",
            )
        return self._sources[name]

    def _way(self, corpus: int, phase: int) -> Way:
        if corpus not in self._ways[phase]:
            for number in range(phase + 1):
                if corpus not in self._ways[number]:
                    self._ways[number].setdefault(corpus, self._begun(corpus, number))
        return self._ways[phase][corpus]

    def _even_ways(self, phase: int, corpora: Int64) -> EvenWays:
        """Return what is known of even ways, those of some corpora that are here among them."""
        even = self._even[phase]
        for corpus in even.unknown(corpora):
            if self.names[corpus] in self._sources:
                way, cap = self._way(corpus, phase), self._source(corpus).max_epochs
                even.learn(corpus, way, supply=None if cap is None else way.max_samples(cap))
        return even

    def _begun(self, corpus: int, phase: int) -> Way:
        """Return a corpus's way in a phase; the phase before it has one."""
        source, length = self._source(corpus), self.length(phase)
        if phase:
            taken = self._stretches.taken[phase - 1].get(corpus, 0)
            way = source.reach(self._ways[phase - 1][corpus], taken - 1).at_length(taken, length)
        else:
            way = begin(replace(self._plans[source.name], sequence_length=length), source.corpus)
        for grown, taken, parts in self._stretches.grown[phase]:
            if grown == corpus:
                # Only what is finished is appended to, so its way can be followed to where it has no end.
                way = source.reach(way, MOST_SAMPLES).grown(taken, source.corpus, parts)
        return way

    def _ends(self, corpus: int, source: Source) -> int | None:
        """Return the first sample id that a corpus's cap on epochs refuses, if one is known."""
        if source.max_epochs is None:
            return None
        for number, stretch in enumerate(self._stretches.all):
            supply = self._way(corpus, stretch.phase).max_samples(source.max_epochs)
            if supply is None:
                return None  # it is still being prepared; what comes later is not known either
            end = self._stretches.first_served(number, corpus, supply)
            if end is not None:
                return end
        return None

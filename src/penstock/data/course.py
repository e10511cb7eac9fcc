"""Global sample ids -> corpus and place, over everything that changed during a run.

A *stretch* is a run of sample ids with one mixture, a *phase* one with one sequence length. Within a phase
each corpus goes along one way (see way.py), counting its own samples; a change of weights goes on
counting, a change of length starts the next way where the last one stood.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from penstock.data.corpus import Corpus
from penstock.data.mixture import Mixture
from penstock.data.order import Places
from penstock.data.pool import PackedPool
from penstock.data.source import Source
from penstock.data.timeline import Timeline
from penstock.data.types import Int64
from penstock.data.way import Plan, Way, begin


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples of one mixture and one sequence length."""

    first: int
    """Its first sample id."""
    phase: int
    """Index of the sequence length."""
    mixture: Mixture
    """Numbers the corpora it holds in its own order."""
    corpora: Int64
    """[corpora of the mixture] their indices in the course."""
    base: Int64
    """[corpora of the mixture] samples of each that came before in this phase."""
    before: dict[int, int]
    """Samples of each corpus of the course that came before in this phase."""
    totals: dict[int, int]
    """Samples of each corpus of the course that came before in all phases."""


@dataclass(frozen=True, slots=True)
class Located:
    """Samples by corpus; all arrays are [n] int64."""

    corpus: Int64
    """Index of the corpus in the course."""
    turn: Int64
    """The corpus's own sample in this phase."""
    phase: int
    """Index of the sequence length; the same for all of them."""


_mixture = lru_cache(maxsize=64)(lambda slots: Mixture(dict(slots)))


class Course:
    """What a timeline makes of a set of corpora.

    Args:
        sources: by name; the order numbers the corpora.
        plans: by name; how each corpus's order is keyed and sized at the first length.
    """

    def __init__(self, timeline: Timeline, sources: Mapping[str, Source], plans: Mapping[str, Plan]) -> None:
        self.names = list(sources)
        self._sources = list(sources.values())
        self._index = {name: index for index, name in enumerate(self.names)}
        self._plans = plans
        self.timeline = timeline
        self._stretches: list[Stretch] = []
        self._ways: list[dict[int, Way]] = [{}]
        for step in timeline.turns():
            self._turn_to(step)
        self._firsts = [stretch.first for stretch in self._stretches]

    def locate(self, samples: Int64) -> Located:
        """Return whose samples [n] are; all must be of one sequence length."""
        index = bisect_right(self._firsts, int(samples.min())) - 1
        if index + 1 < len(self._firsts) and int(samples.max()) >= self._firsts[index + 1]:
            of = np.searchsorted(self._firsts, samples, side="right") - 1
            corpus, turn = np.empty_like(samples), np.empty_like(samples)
            for each in np.unique(of).tolist():
                chosen = of == each
                corpus[chosen], turn[chosen] = self._in_stretch(each, samples[chosen])
        else:
            corpus, turn = self._in_stretch(index, samples)
        return Located(corpus, turn, self._stretches[index].phase)

    def way(self, corpus: int, phase: int, *, last: int) -> Way:
        """Return a corpus's way in a phase, reaching to one of its samples at least.

        Raises:
            CorpusExhausted: the sample is beyond the cap on epochs.
        """
        way = self._way(corpus, phase)
        source = self._sources[corpus]
        if way.ends is not None and last >= way.ends:
            way = self._ways[phase][corpus] = source.reach(way, last)
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
        for corpus in np.unique(located.corpus).tolist():
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
        stretch = self._stretches[max(0, bisect_right(self._firsts, sample - 1) - 1)]
        totals = _plus(stretch.totals, stretch, sample)
        return {name: totals.get(index, 0) for index, name in enumerate(self.names)}

    def rows(self, corpus: int, phase: int, places: Int64) -> tuple[Source, list[Int64]]:
        """Return a corpus and the piece tables of its rows at places [n, 4]: leg, epoch, pool, row."""
        source = self._sources[corpus]
        return source, source.rows(self._way(corpus, phase), phase, places)

    def samples_per_epoch(self) -> dict[str, int]:
        """Return the rows of one pass over each corpus as a whole, in the last phase."""
        ways = {name: self._way(index, len(self._ways) - 1) for index, name in enumerate(self.names)}
        return {
            name: way.firsts[-1] if way.ends is not None else way.legs[-1].order.samples_per_epoch
            for name, way in ways.items()
        }

    def parts_begun(self, name: str, step: int) -> int:
        """Return how many parts of a streamed corpus were begun before a step."""
        corpus, first = self._index[name], self.timeline.first_sample(step)
        index = max(0, bisect_right(self._firsts, first - 1) - 1)
        stretch = self._stretches[index]
        taken = _plus(stretch.before, stretch, first).get(corpus, 0)
        way = self._way(corpus, stretch.phase)
        if not taken:
            return way.parts - len(way.legs)
        way = self._sources[corpus].reach(way, taken - 1)
        to_come = sum(
            leg.epochs is not None and at >= taken for leg, at in zip(way.legs, way.firsts, strict=False)
        )
        return way.parts - to_come

    def supply(self) -> int | None:
        """Return the first sample id that a capped corpus cannot give, or None where none is capped."""
        ends = []
        for index, stretch in enumerate(self._stretches):
            past = self._firsts[index + 1] if index + 1 < len(self._firsts) else None
            for position, corpus in enumerate(stretch.corpora.tolist()):
                cap = self._sources[corpus].max_epochs
                supply = None if cap is None else self._way(corpus, stretch.phase).max_samples(cap)
                if supply is not None and stretch.mixture.slots[self.names[corpus]]:
                    turn = max(0, supply - int(stretch.base[position]))
                    end = stretch.first + stretch.mixture.sample_of(position, turn)
                    ends += [end] if past is None or end < past else []
        return min(ends, default=None)

    def sample_of(self, corpus: int, phase: int, turn: int) -> int | None:
        """Return the sample id that is a corpus's own sample of a phase: the inverse of `locate`.

        None where the run turned to another length before it came to that sample.
        """
        for index, stretch in enumerate(self._stretches):
            position = np.flatnonzero(stretch.corpora == corpus)
            if stretch.phase != phase or not len(position) or not stretch.mixture.slots[self.names[corpus]]:
                continue
            base = int(stretch.base[position[0]])
            if turn < base:
                continue
            sample = stretch.first + stretch.mixture.sample_of(int(position[0]), turn - base)
            if index + 1 == len(self._stretches) or sample < self._firsts[index + 1]:
                return sample
        return None

    def corpus(self, corpus: int) -> Corpus:
        """Return a corpus by its index."""
        return self._sources[corpus].corpus

    def pool(self, corpus: int, phase: int, place: tuple[int, int, int]) -> PackedPool:
        """Return a pool of a corpus by leg, epoch and number."""
        return self._sources[corpus].pool(self._way(corpus, phase), (phase, *place))

    def taken(self, corpus: int, steps: range) -> list[range]:
        """Return which own samples of a corpus some steps take, skipped ones too: a range for each phase."""
        first, past = self.timeline.first_sample(steps.start), self.timeline.first_sample(steps.stop)
        ranges = [range(0)] * len(self._ways)
        for stretch, end in zip(self._stretches, [*self._firsts[1:], past], strict=True):
            low, high = max(first, stretch.first), min(past, end)
            if low < high:
                turns = [_plus(stretch.before, stretch, sample).get(corpus, 0) for sample in (low, high)]
                so_far = ranges[stretch.phase]
                ranges[stretch.phase] = range(so_far.start if so_far else turns[0], turns[1])
        return ranges

    def _in_stretch(self, index: int, samples: Int64) -> tuple[Int64, Int64]:
        stretch = self._stretches[index]
        inside, turn = stretch.mixture.locate(samples - stretch.first)
        return stretch.corpora[inside], turn + stretch.base[inside]

    def _way(self, corpus: int, phase: int) -> Way:
        ways = self._ways[phase]
        if corpus not in ways:
            source, length = self._sources[corpus], self.timeline.length[phase][1]
            ways[corpus] = begin(replace(self._plans[source.name], sequence_length=length), source.corpus)
        return ways[corpus]

    def _turn_to(self, step: int) -> None:
        """Open the stretch that begins with a step, and the phase if the length changes there."""
        timeline, first = self.timeline, self.timeline.first_sample(step)
        before: dict[int, int] = {}
        totals: dict[int, int] = {}
        if self._stretches:
            last = self._stretches[-1]
            before, totals = _plus(last.before, last, first), _plus(last.totals, last, first)
        if step and any(start == step for start, _ in timeline.length):
            self._ways.append(self._at_length(timeline.length_at(step), before))
            before = {}
        for start, name, parts in timeline.grown:
            if start == step:
                corpus = self._index[name]
                grown = self._way(corpus, len(self._ways) - 1).grown(
                    before.get(corpus, 0), self._sources[corpus].corpus, parts
                )
                self._ways[-1][corpus] = grown
        slots = timeline.slots_at(step)
        corpora = np.array([self._index[name] for name in slots], dtype=np.int64)
        base = np.array([before.get(corpus, 0) for corpus in corpora.tolist()], dtype=np.int64)
        mixture: Mixture = _mixture(tuple(slots.items()))
        self._stretches.append(Stretch(first, len(self._ways) - 1, mixture, corpora, base, before, totals))

    def _at_length(self, length: int, taken: Mapping[int, int]) -> dict[int, Way]:
        """Return the ways of the corpora that were begun, at another length."""
        ways = {}
        for corpus in {*self._ways[-1], *(corpus for corpus, samples in taken.items() if samples)}:
            samples, way = taken.get(corpus, 0), self._way(corpus, len(self._ways) - 1)
            ways[corpus] = self._sources[corpus].reach(way, samples - 1).at_length(samples, length)
        return ways


def _plus(counts: Mapping[int, int], stretch: Stretch, sample: int) -> dict[int, int]:
    """Add what a stretch serves with ids below a sample's."""
    inside = stretch.mixture.counts(max(0, sample - stretch.first))
    return dict(counts) | {
        corpus: counts.get(corpus, 0) + count
        for corpus, count in zip(stretch.corpora.tolist(), inside, strict=True)
    }

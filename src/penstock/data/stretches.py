"""Global sample ids -> corpus and its own sample, over every change of mixture and sequence length.

A *stretch* is a run of sample ids with one mixture, a *phase* one with one sequence length. Within a phase
each corpus counts its own samples: a change of weights counts on, a change of length starts anew.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.data.mixture import Mixture
from penstock.data.timeline import Timeline
from penstock.data.types import Int64

Slots = tuple[tuple[str, int], ...]

# A pattern takes a tenth of a second and a megabyte; counting a stretch that has ended takes it only once.
_mixture = lru_cache(maxsize=16)(lambda slots: Mixture(dict(slots)))
_counts = lru_cache(maxsize=4096)(lambda slots, samples: tuple(_mixture(slots).counts(samples)))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples of one mixture and one sequence length."""

    first: int
    """Its first sample id."""
    phase: int
    """Index of the sequence length."""
    slots: Slots
    """Of the corpora it may draw on, in the order that lays the pattern out."""
    corpora: Int64
    """[corpora of the mixture] their indices."""
    base: Int64
    """[corpora of the mixture] samples of each that came before in this phase."""
    before: dict[int, int]
    """Samples of each corpus that came before in this phase."""
    totals: dict[int, int]
    """Samples of each corpus that came before in all phases."""

    @property
    def mixture(self) -> Mixture:
        """What numbers the corpora in the order of the slots."""
        mixture: Mixture = _mixture(self.slots)
        return mixture

    def place_of(self, corpus: int) -> int | None:
        """Return the number of a corpus in the mixture, or None where it has no share."""
        found = np.flatnonzero(self.corpora == corpus)
        return int(found[0]) if len(found) and self.slots[int(found[0])][1] else None

    def plus(self, counts: Mapping[int, int], sample: int) -> dict[int, int]:
        """Add what this stretch serves with ids below a sample's to the counts of corpora."""
        inside = _counts(self.slots, max(0, sample - self.first))
        return dict(counts) | {
            corpus: counts.get(corpus, 0) + count
            for corpus, count in zip(self.corpora.tolist(), inside, strict=True)
        }


@dataclass(frozen=True, slots=True)
class Located:
    """Samples by corpus; all arrays are [n] int64."""

    corpus: Int64
    """Index of the corpus."""
    turn: Int64
    """The corpus's own sample in this phase."""
    phase: int
    """Index of the sequence length; the same for all of them."""


class Stretches:
    """The stretches of a timeline; the last one has no end.

    Args:
        index: number of each corpus by name.
    """

    def __init__(self, timeline: Timeline, index: Mapping[str, int]) -> None:
        self.lengths = [length for _, length in timeline.lengths]
        """Of each phase."""
        self.taken: list[dict[int, int]] = []
        """For each phase that has ended: samples of each corpus in it."""
        self.grown: list[list[tuple[int, int, int]]] = [[] for _ in self.lengths]
        """For each phase: corpus, its samples before in the phase, its parts from there on."""
        self.all: list[Stretch] = []
        self._timeline, self._index = timeline, index
        for step in timeline.turns():
            self._turn_to(step)
        self.firsts = [stretch.first for stretch in self.all]

    def locate(self, samples: Int64) -> Located | None:
        """Return whose samples [n] are; None where they are of different sequence lengths."""
        index, last = self.number_of(int(samples.min())), self.number_of(int(samples.max()))
        if index == last:
            return Located(*self._in_stretch(index, samples), self.all[index].phase)
        if self.all[index].phase != self.all[last].phase:
            return None
        of = np.searchsorted(self.firsts, samples, side="right") - 1
        corpus, turn = np.empty_like(samples), np.empty_like(samples)
        for each in np.unique(of).tolist():
            chosen = of == each
            corpus[chosen], turn[chosen] = self._in_stretch(each, samples[chosen])
        return Located(corpus, turn, self.all[index].phase)

    def number_of(self, sample: int) -> int:
        """Return the number of the stretch that holds a sample id; of a negative one, the first."""
        return max(0, bisect_right(self.firsts, sample) - 1)

    def phase_of(self, sample: int) -> int:
        """Return the phase of a sample id."""
        return self.all[self.number_of(sample)].phase

    def totals(self, sample: int) -> dict[int, int]:
        """Return how many samples of each corpus have an id below a sample's."""
        stretch = self.all[self.number_of(sample - 1)]
        return stretch.plus(stretch.totals, sample)

    def taken_before(self, sample: int) -> list[dict[int, int]]:
        """Return, for each phase up to a sample's, how many samples of each corpus have an id below it."""
        stretch = self.all[self.number_of(sample)]
        return [*self.taken[: stretch.phase], stretch.plus(stretch.before, sample)]

    def ranges(self, corpus: int, first: int, past: int) -> list[range]:
        """Return which own samples of a corpus have ids [first, past): a range for each phase."""
        ranges = [range(0)] * len(self.lengths)
        for stretch, end in zip(self.all, [*self.firsts[1:], past], strict=True):
            low, high = max(first, stretch.first), min(past, end)
            if low < high:
                turns = [stretch.plus(stretch.before, sample).get(corpus, 0) for sample in (low, high)]
                so_far = ranges[stretch.phase]
                ranges[stretch.phase] = range(so_far.start if so_far else turns[0], turns[1])
        return ranges

    def sample_of(self, corpus: int, phase: int, turn: int) -> int | None:
        """Return the sample id that is a corpus's own sample of a phase: the inverse of `locate`.

        None where the run turned to another length before it came to that sample.
        """
        for number, stretch in enumerate(self.all):
            place = stretch.place_of(corpus)
            if stretch.phase == phase and place is not None and turn >= stretch.base[place]:
                sample = stretch.first + stretch.mixture.sample_of(place, turn - int(stretch.base[place]))
                if self._holds(number, sample):
                    return sample
        return None

    def first_served(self, number: int, corpus: int, turn: int) -> int | None:
        """Return the first sample id that is served as a corpus's own sample `turn` or a later one.

        None where the stretch ends before it.
        """
        stretch = self.all[number]
        place = stretch.place_of(corpus)
        if place is None:
            return None
        inside = max(0, turn - int(stretch.base[place]))
        sample = stretch.first + stretch.mixture.sample_of(place, inside)
        for skip in self._timeline.skips:
            if skip.start <= sample < skip.stop:
                inside = stretch.mixture.counts(skip.stop - stretch.first)[place]
                sample = stretch.first + stretch.mixture.sample_of(place, inside)
        return sample if self._holds(number, sample) else None

    def _holds(self, number: int, sample: int) -> bool:
        return number + 1 == len(self.all) or sample < self.firsts[number + 1]

    def _in_stretch(self, index: int, samples: Int64) -> tuple[Int64, Int64]:
        stretch = self.all[index]
        inside, turn = stretch.mixture.locate(samples - stretch.first)
        return stretch.corpora[inside], turn + stretch.base[inside]

    def _turn_to(self, step: int) -> None:
        """Open the stretch that begins with a step, and the phase if the length changes there."""
        timeline = self._timeline
        # What is skipped from the start on belongs to the first stretch, or others would take its turn.
        first = timeline.first_sample(step) if self.all else 0
        before: dict[int, int] = {}
        totals: dict[int, int] = {}
        if self.all:
            last = self.all[-1]
            before, totals = last.plus(last.before, first), last.plus(last.totals, first)
        if step and any(start == step for start, _ in timeline.lengths):
            self.taken.append(before)
            before = {}
        for start, name, parts in timeline.grown:
            if start == step:
                self.grown[len(self.taken)].append(
                    (self._index[name], before.get(self._index[name], 0), parts)
                )
        slots = tuple(timeline.slots_at(step).items())
        corpora = np.array([self._index[name] for name, _ in slots], dtype=np.int64)
        base = np.array([before.get(corpus, 0) for corpus in corpora.tolist()], dtype=np.int64)
        self.all.append(Stretch(first, len(self.taken), slots, corpora, base, before, totals))

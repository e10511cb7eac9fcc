"""Schedule segments: global sample ids -> corpus and its own sample, over every change of mixture and length.

A *segment* is a range of sample ids with one mixture, a *phase* one with one sequence length. Within a phase
each corpus numbers its own samples: a change of weights continues the numbering, a change of length restarts
it at 0. A mixture continues through changes of length and growth, so its shares are exact over all of them.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.schedule.change_log import ChangeLog
from penstock.data.schedule.mixture import Mixture, mixture_of

SlotPairs = tuple[tuple[str, int], ...]

# Building a pattern takes 0.1 s and 1 MB; the counts of a finished segment are computed only once.
_mixture = lru_cache(maxsize=16)(lambda slots: mixture_of(dict(slots)))
_counts = lru_cache(maxsize=4096)(lambda slots, samples: tuple(_mixture(slots).counts(samples)))


@dataclass(frozen=True, slots=True)
class Segment:
    """Samples of one mixture and one sequence length."""

    first: int
    """First sample id."""
    origin: int
    """Sample id from which its mixture counts."""
    phase: int
    """Index of the sequence length."""
    slots: SlotPairs
    """Slots of each corpus it may draw on, in the order that lays out the pattern."""
    corpora: Int64
    """[members] indices of the corpora in the mixture."""
    base: Int64
    """[members] offset from a corpus's own sample in the mixture to its own sample in this phase."""
    before: dict[int, int]
    """Samples of each corpus earlier in this phase."""
    totals: dict[int, int]
    """Samples of each corpus earlier in the run."""

    @property
    def mixture(self) -> Mixture:
        """Mixture of the slots; it numbers the corpora in their order."""
        mixture: Mixture = _mixture(self.slots)
        return mixture

    def member_of(self, corpus: int) -> int | None:
        """Return the number of a corpus in the mixture; None if it has no share."""
        found = np.flatnonzero(self.corpora == corpus)
        return int(found[0]) if len(found) and self.slots[int(found[0])][1] else None

    def plus(self, counts: Mapping[int, int], sample: int) -> dict[int, int]:
        """Add the samples of this segment with ids below `sample` to the counts of the corpora."""
        early, late = self.counts(self.first), self.counts(max(self.first, sample))
        return dict(counts) | {
            corpus: counts.get(corpus, 0) + past - before
            for corpus, before, past in zip(self.corpora.tolist(), early, late, strict=True)
        }

    def counts(self, sample: int) -> tuple[int, ...]:
        """Return how many sample ids below `sample` the mixture gives to each of its corpora."""
        counts: tuple[int, ...] = _counts(self.slots, sample - self.origin)
        return counts

    def sample_of(self, member: int, turn: int) -> int:
        """Return the sample id of own sample `turn`, in this phase, of a corpus of the mixture."""
        return self.origin + self.mixture.sample_of(member, turn - int(self.base[member]))


@dataclass(frozen=True, slots=True)
class Located:
    """Corpus and own sample of each sample id; all arrays are [n] int64."""

    corpus: Int64
    """Index of the corpus."""
    turn: Int64
    """The corpus's own sample in this phase."""
    phase: int
    """Index of the sequence length, the same for all samples."""


class ScheduleSegments:
    """Segments of a change log in ascending order; the last one is endless.

    Args:
        index: number of each corpus by name.
    """

    def __init__(self, change_log: ChangeLog, index: Mapping[str, int]) -> None:
        self.lengths = [length for _, length in change_log.lengths]
        """Sequence length of each phase."""
        self.taken: list[dict[int, int]] = []
        """For each finished phase: samples of each corpus in it."""
        self.grown: list[list[tuple[int, int, int]]] = [[] for _ in self.lengths]
        """For each phase: corpus, its samples earlier in the phase, its number of parts from there on."""
        self.all: list[Segment] = []
        self._change_log, self._index = change_log, index
        for step in change_log.change_steps():
            self._open_segment(step)
        self.firsts = [segment.first for segment in self.all]

    def locate(self, samples: Int64) -> Located | None:
        """Return corpus and own sample of sample ids [n]; None if they have different sequence lengths."""
        index, last = self.number_of(int(samples.min())), self.number_of(int(samples.max()))
        if index == last:
            return Located(*self._in_segment(index, samples), self.all[index].phase)
        if self.all[index].phase != self.all[last].phase:
            return None
        of = np.searchsorted(self.firsts, samples, side="right") - 1
        corpus, turn = np.empty_like(samples), np.empty_like(samples)
        for each in np.unique(of).tolist():
            chosen = of == each
            corpus[chosen], turn[chosen] = self._in_segment(each, samples[chosen])
        return Located(corpus, turn, self.all[index].phase)

    def number_of(self, sample: int) -> int:
        """Return the number of the segment that contains a sample id; 0 for a negative one."""
        return max(0, bisect_right(self.firsts, sample) - 1)

    def phase_of(self, sample: int) -> int:
        """Return the phase of a sample id."""
        return self.all[self.number_of(sample)].phase

    def totals(self, sample: int) -> dict[int, int]:
        """Return how many sample ids below `sample` each corpus has."""
        segment = self.all[self.number_of(sample - 1)]
        return segment.plus(segment.totals, sample)

    def taken_before(self, sample: int) -> list[dict[int, int]]:
        """Return, for each phase up to that of `sample`, how many ids below it each corpus has."""
        segment = self.all[self.number_of(sample)]
        return [*self.taken[: segment.phase], segment.plus(segment.before, sample)]

    def ranges(self, corpus: int, first: int, past: int) -> list[range]:
        """Return a corpus's own samples with ids [first, past): a range for each phase."""
        ranges = [range(0)] * len(self.lengths)
        for segment, end in zip(self.all, [*self.firsts[1:], past], strict=True):
            low, high = max(first, segment.first), min(past, end)
            if low < high:
                turns = [segment.plus(segment.before, sample).get(corpus, 0) for sample in (low, high)]
                so_far = ranges[segment.phase]
                ranges[segment.phase] = range(so_far.start if so_far else turns[0], turns[1])
        return ranges

    def sample_of(self, corpus: int, phase: int, turn: int) -> int | None:
        """Return the sample id of a corpus's own sample in a phase: the inverse of `locate`.

        None if the run changed to another length before that sample.
        """
        for number, segment in enumerate(self.all):
            member = segment.member_of(corpus)
            if segment.phase == phase and member is not None and turn >= segment.before.get(corpus, 0):
                sample = segment.sample_of(member, turn)
                if self._holds(number, sample):
                    return sample
        return None

    def first_served(self, number: int, corpus: int, turn: int) -> int | None:
        """Return the first sample id of a segment that serves own sample `turn` of a corpus or a later one.

        None if the segment ends before it.
        """
        segment = self.all[number]
        member = segment.member_of(corpus)
        if member is None:
            return None
        sample = segment.sample_of(member, max(turn, segment.before.get(corpus, 0)))
        for skip in self._change_log.skips:
            if skip.start <= sample < skip.stop:
                sample = segment.sample_of(
                    member, segment.counts(skip.stop)[member] + int(segment.base[member])
                )
        return sample if self._holds(number, sample) else None

    def _holds(self, number: int, sample: int) -> bool:
        return number + 1 == len(self.all) or sample < self.firsts[number + 1]

    def _in_segment(self, index: int, samples: Int64) -> tuple[Int64, Int64]:
        segment = self.all[index]
        inside, turn = segment.mixture.locate(samples - segment.origin)
        return segment.corpora[inside], turn + segment.base[inside]

    def _open_segment(self, step: int) -> None:
        """Append the segment that begins at a step, and a phase if the sequence length changes there."""
        change_log = self._change_log
        # Ids skipped at the very start belong to the first segment, so that no other corpus loses its turn.
        first = change_log.first_sample(step) if self.all else 0
        before: dict[int, int] = {}
        totals: dict[int, int] = {}
        if self.all:
            last = self.all[-1]
            before, totals = last.plus(last.before, first), last.plus(last.totals, first)
        if step and any(start == step for start, _ in change_log.lengths):
            self.taken.append(before)
            before = {}
        for start, name, parts in change_log.grown:
            if start == step:
                self.grown[len(self.taken)].append(
                    (self._index[name], before.get(self._index[name], 0), parts)
                )
        slots = tuple(change_log.slots_at(step).items())
        begins = any(start == step for start, _, _ in change_log.mixtures)
        origin = first if begins else self.all[-1].origin
        corpora = np.array([self._index[name] for name, _ in slots], dtype=np.int64)
        turns = np.array([before.get(corpus, 0) for corpus in corpora.tolist()], dtype=np.int64)
        base = turns - np.array(_counts(slots, first - origin), dtype=np.int64)
        self.all.append(Segment(first, origin, len(self.taken), slots, corpora, base, before, totals))

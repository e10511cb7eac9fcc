"""What a run was told to read, and from which step on: batch sizes, lengths, mixtures, skips, growth.

All entries take effect between two steps. A timeline is immutable: a change makes a new one, so what is
computed ahead from the old one is never half right. Steps map to consumed samples by prefix sums;
consumed samples to sample ids by stepping over what is skipped.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from penstock.core.errors import UsageError
from penstock.data.types import Int64

T = TypeVar("T")
E = TypeVar("E", bound=tuple[Any, ...])  # Any: step, then what an entry holds

MOST_SAMPLES = 2**62
"""What sample arithmetic in int64 can hold."""

MOST_LENGTH = 2**30
"""Tokens of a row: a pool of such rows can still be counted, and a row still be in memory."""

Slots = dict[str, int]


@dataclass(frozen=True, slots=True)
class Skip:
    """Samples that are never served."""

    start: int
    """First sample id."""
    stop: int
    """Past the last one."""
    reason: str
    """Why, for whoever reads the state later."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Entries are (first step, value), ascending from step 0; each holds until the next.

    Entries to come may repeat the one before: were they left out, a change in between would hold on past
    them. `lengths` and `mixtures` are what is in effect.
    """

    batch: tuple[tuple[int, int], ...]
    """Global batch size."""
    length: tuple[tuple[int, int], ...]
    """Sequence length."""
    mix: tuple[tuple[int, Slots, str], ...]
    """Slots of each corpus (see mixture.py), and what asked for them."""
    skips: tuple[Skip, ...] = ()
    """Ascending and apart."""
    grown: tuple[tuple[int, str, int], ...] = ()
    """Corpus and its number of parts from that step on; steps ascend."""

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The sequence lengths, each with its first step, no two in a row alike."""
        return [
            self.length[0],
            *(late for early, late in pairwise(self.length) if early[1] != late[1]),
        ]

    @property
    def mixtures(self) -> list[tuple[int, Slots, str]]:
        """The mixtures, each with its first step and reason, no two in a row alike."""
        return [
            self.mix[0],
            *(late for early, late in pairwise(self.mix) if _shares(early[1]) != _shares(late[1])),
        ]

    def consumed_before(self, step: int) -> int:
        """Return how many samples the steps before a step consume.

        Raises:
            UsageError: the step is negative.
        """
        if step < 0:
            raise UsageError("A step must be zero or more", got=step)
        index = bisect_right(self.batch, step, key=lambda entry: entry[0]) - 1
        past = sum((late - early) * size for (early, size), (late, _) in pairwise(self.batch[: index + 1]))
        start, size = self.batch[index]
        return past + (step - start) * size

    def tokens_before(self, step: int) -> int:
        """Return how many tokens, padding counted, the steps before a step consume."""
        edges = [start for start, _ in self.length if start < step] + [step]
        consumed = [self.consumed_before(edge) for edge in edges]
        lengths = [length for _, length in self.length]
        return sum((b - a) * length for (a, b), length in zip(pairwise(consumed), lengths, strict=False))

    def samples_of(self, step: int) -> Int64:
        """Return the sample ids of a step [global batch size].

        Raises:
            UsageError: the step is negative, or beyond what samples can be counted to.
        """
        return self.samples_in(range(step, step + 1))

    def samples_in(self, steps: range) -> Int64:
        """Return the sample ids of some steps, end to end; errors are as of samples_of."""
        first, past = steps.start, steps.stop
        if not 0 <= first < past <= MOST_SAMPLES or (stop := self.consumed_before(past)) > MOST_SAMPLES:
            raise UsageError("A step must be zero or more, and within 2^62 samples", got=past - 1)
        return self._ids(np.arange(self.consumed_before(first), stop, dtype=np.int64))

    def steps_alike(self, step: int, *, most: int) -> range:
        """Return the steps from a step on, at most so many, before anything changes or samples run out."""
        changes = [*self.turns(), *(start for start, _ in self.batch), step + most]
        fit = (MOST_SAMPLES - self.consumed_before(step)) // self.batch_size_at(step)
        return range(step, min(min(change for change in changes if change > step), step + max(1, fit)))

    def first_sample(self, step: int) -> int:
        """Return the smallest sample id of a step."""
        sample = self.consumed_before(step)
        for skip in self.skips:
            if skip.start > sample:
                break
            sample += skip.stop - skip.start
        return sample

    def step_of(self, sample: int) -> int | None:
        """Return the step that serves a sample id, or None where it is skipped."""
        if any(skip.start <= sample < skip.stop for skip in self.skips):
            return None
        consumed = sample - sum(skip.stop - skip.start for skip in self.skips if skip.stop <= sample)
        index = bisect_right(self.batch, consumed, key=lambda entry: self.consumed_before(entry[0])) - 1
        start, size = self.batch[index]
        return start + (consumed - self.consumed_before(start)) // size

    def turns(self) -> list[int]:
        """Return the steps, ascending, at which the mixture, the length or a corpus changes."""
        steps = [
            *(step for step, _, _ in self.mixtures),
            *(step for step, _ in self.lengths),
            *(step for step, _, _ in self.grown),
        ]
        return sorted(set(steps))

    def batch_size_at(self, step: int) -> int:
        """Return the global batch size of a step."""
        return _at(self.batch, step)

    def length_at(self, step: int) -> int:
        """Return the sequence length of a step."""
        return _at(self.length, step)

    def slots_at(self, step: int) -> Slots:
        """Return the mixture of a step."""
        return self.mix[bisect_right(self.mix, step, key=lambda entry: entry[0]) - 1][1]

    def with_batch_size(self, step: int, size: int) -> "Timeline":
        """Return the timeline with another batch size from a step on, until the next planned one."""
        return replace(self, batch=_changed(self.batch, (step, size)))

    def with_length(self, step: int, length: int) -> "Timeline":
        """Return the timeline with another sequence length from a step on, until the next planned one."""
        return replace(self, length=_changed(self.length, (step, length)))

    def with_slots(self, step: int, slots: Mapping[str, int], reason: str) -> "Timeline":
        """Return the timeline with another mixture from a step on, until the next planned one."""
        return replace(self, mix=_changed(self.mix, (step, dict(slots), reason)))

    def with_parts(self, step: int, name: str, parts: int) -> "Timeline":
        """Return the timeline with more parts of a corpus from a step on."""
        grown = sorted([*self.grown, (step, name, parts)], key=lambda entry: entry[0])
        return replace(self, grown=tuple(grown))

    def skips_all(self, start: int, stop: int) -> bool:
        """Return whether sample ids [start, stop) are all skipped."""
        return start >= stop or any(skip.start <= start and stop <= skip.stop for skip in self.skips)

    def with_skip(self, skip: Skip) -> "Timeline":
        """Return the timeline with more samples left out; skips that touch become one."""
        apart = [s for s in self.skips if s.stop < skip.start or s.start > skip.stop]
        touching = [s for s in self.skips if s not in apart]
        start = min([skip.start, *(s.start for s in touching)])
        stop = max([skip.stop, *(s.stop for s in touching)])
        reasons = [reason for s in [*touching, skip] for reason in s.reason.split("; ") if reason]
        joined = Skip(start, stop, "; ".join(dict.fromkeys(reasons)))
        return replace(self, skips=tuple(sorted([*apart, joined], key=lambda s: s.start)))

    def until(self, step: int) -> "Timeline":
        """Return what was in effect for the steps before a step, and no more."""
        batch = [self.batch[0], *(late for early, late in pairwise(self.batch) if early[1] != late[1])]
        return replace(
            self,
            batch=tuple(entry for entry in batch if entry[0] < step),
            length=tuple(entry for entry in self.lengths if entry[0] < step),
            mix=tuple(entry for entry in self.mixtures if entry[0] < step),
            grown=tuple(entry for entry in self.grown if entry[0] < step),
        )

    def settled(self, step: int) -> "Timeline":
        """Return the same without entries up to a step that change nothing."""
        past = self.until(step + 1)
        return replace(
            self,
            batch=past.batch + tuple(entry for entry in self.batch if entry[0] > step),
            length=past.length + tuple(entry for entry in self.length if entry[0] > step),
            mix=past.mix + tuple(entry for entry in self.mix if entry[0] > step),
        )

    def _ids(self, consumed: Int64) -> Int64:
        if not self.skips:
            return consumed
        sizes = np.array([skip.stop - skip.start for skip in self.skips], dtype=np.int64)
        before = np.concatenate(([0], np.cumsum(sizes)))
        starts = np.array([skip.start for skip in self.skips], dtype=np.int64) - before[:-1]
        ids: Int64 = consumed + before[np.searchsorted(starts, consumed, side="right")]
        return ids


def _at(entries: Sequence[tuple[int, T]], step: int) -> T:
    return entries[bisect_right(entries, step, key=lambda entry: entry[0]) - 1][1]


def _changed(entries: Sequence[E], entry: E) -> tuple[E, ...]:
    """Put an entry (step, value, ...) among others, in place of one of the same step."""
    others = [other for other in entries if other[0] != entry[0]]
    return tuple(sorted([*others, entry], key=lambda other: other[0]))


def _shares(slots: Slots) -> Slots:
    return {name: count for name, count in slots.items() if count}

"""Change log of a run: batch size, sequence length, mixture, skips and corpora, each from a given step on.

All entries take effect between two steps. A change log is immutable: a change makes a new one, so batches
prepared from the old one are discarded as a whole. Steps map to consumed samples by prefix sums, consumed
samples to sample ids by jumping over skipped ranges.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.checks import at_least, check_table
from penstock.core.errors import ConfigError, UsageError
from penstock.data.schedule.mixture import slots_from
from penstock.data.types import MAX_LENGTH, MAX_ROWS, MAX_SAMPLES

T = TypeVar("T")
E = TypeVar("E", bound=tuple[Any, ...])  # Any: step, then what an entry holds

MixtureSlots = dict[str, int]


@dataclass(frozen=True, slots=True)
class Skip:
    """Range of sample ids that is never served."""

    start: int
    """First sample id."""
    stop: int
    """Past-the-last sample id."""
    reason: str
    """Reason, for readers of the state."""


@dataclass(frozen=True, slots=True)
class ChangeLog:
    """Settings of a run over time: entries (first step, value), ascending; each holds until the next.

    A planned entry may repeat the value before it: without it, a change made in between would stay in force
    beyond it. `lengths` and `mixtures` list only the values that differ.
    """

    batch: tuple[tuple[int, int], ...]
    """Global batch size."""
    length: tuple[tuple[int, int], ...]
    """Sequence length."""
    mix: tuple[tuple[int, MixtureSlots, str], ...]
    """Slots of each corpus (see mixture.py), and the reason of the change."""
    skips: tuple[Skip, ...] = ()
    """Ascending, disjoint and not adjacent."""
    grown: tuple[tuple[int, str, int], ...] = ()
    """Name of a corpus and its number of parts from that step on; steps ascend."""

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Sequence lengths with their first steps; consecutive ones differ."""
        return [
            self.length[0],
            *(late for early, late in pairwise(self.length) if early[1] != late[1]),
        ]

    @property
    def mixtures(self) -> list[tuple[int, MixtureSlots, str]]:
        """Mixtures with their first steps and reasons; consecutive ones differ."""
        return [
            self.mix[0],
            *(late for early, late in pairwise(self.mix) if _shares(early[1]) != _shares(late[1])),
        ]

    def consumed_before(self, step: int) -> int:
        """Return the number of samples consumed by the steps before `step`.

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
        """Return the number of tokens, padding included, consumed by the steps before `step`."""
        edges = [start for start, _ in self.length if start < step] + [step]
        consumed = [self.consumed_before(edge) for edge in edges]
        lengths = [length for _, length in self.length]
        return sum((b - a) * length for (a, b), length in zip(pairwise(consumed), lengths, strict=False))

    def samples_of(self, step: int) -> Int64:
        """Return the sample ids of a step [global batch size].

        Raises:
            UsageError: the step is negative, or its samples exceed 2^62.
        """
        return self.samples_in(range(step, step + 1))

    def samples_in(self, steps: range) -> Int64:
        """Return the sample ids of consecutive steps, concatenated; raises as `samples_of` does."""
        first, past = steps.start, steps.stop
        if not 0 <= first < past <= MAX_SAMPLES or (stop := self.consumed_before(past)) > MAX_SAMPLES:
            raise UsageError("A step must be zero or more, and within 2^62 samples", got=past - 1)
        return self._ids(np.arange(self.consumed_before(first), stop, dtype=np.int64))

    def steps_alike(self, step: int, *, most: int) -> range:
        """Return the range of at most `most` steps from `step` on that have the same settings."""
        changes = [*self.change_steps(), *(start for start, _ in self.batch), step + most]
        fit = (MAX_SAMPLES - self.consumed_before(step)) // self.batch_size_at(step)
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
        """Return the step that serves a sample id; None if it is skipped."""
        if any(skip.start <= sample < skip.stop for skip in self.skips):
            return None
        consumed = sample - sum(skip.stop - skip.start for skip in self.skips if skip.stop <= sample)
        index = bisect_right(self.batch, consumed, key=lambda entry: self.consumed_before(entry[0])) - 1
        start, size = self.batch[index]
        return start + (consumed - self.consumed_before(start)) // size

    def change_steps(self) -> list[int]:
        """Return the steps, ascending, at which the mixture, the sequence length or a corpus changes."""
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

    def slots_at(self, step: int) -> MixtureSlots:
        """Return the mixture of a step."""
        return self.mix[bisect_right(self.mix, step, key=lambda entry: entry[0]) - 1][1]

    def with_batch_size(self, step: int, size: int) -> "ChangeLog":
        """Return the change log with another batch size from a step on, until the next planned one."""
        return replace(self, batch=_changed(self.batch, (step, size)))

    def with_length(self, step: int, length: int) -> "ChangeLog":
        """Return the change log with another sequence length from a step on, until the next planned one."""
        return replace(self, length=_changed(self.length, (step, length)))

    def with_slots(self, step: int, slots: Mapping[str, int], reason: str) -> "ChangeLog":
        """Return the change log with another mixture from a step on, until the next planned one."""
        return replace(self, mix=_changed(self.mix, (step, dict(slots), reason)))

    def with_member(self, step: int, name: str) -> "ChangeLog":
        """Return the change log with a corpus added, at weight 0, to the mixtures planned after a step."""
        mix = (
            (at, {**slots, name: slots.get(name, 0)} if at > step else slots, why)
            for at, slots, why in self.mix
        )
        return replace(self, mix=tuple(mix))

    def without_member(self, step: int, name: str) -> "ChangeLog":
        """Return the change log with a corpus removed from the mixtures planned after a step."""

        def others(slots: MixtureSlots) -> MixtureSlots:
            return {other: count for other, count in slots.items() if other != name}

        return replace(
            self, mix=tuple((at, others(slots) if at > step else slots, why) for at, slots, why in self.mix)
        )

    def with_parts(self, step: int, name: str, parts: int) -> "ChangeLog":
        """Return the change log with more parts of a corpus from a step on."""
        grown = sorted([*self.grown, (step, name, parts)], key=lambda entry: entry[0])
        return replace(self, grown=tuple(grown))

    def skips_all(self, start: int, stop: int) -> bool:
        """Return True if sample ids [start, stop) are all skipped."""
        return start >= stop or any(skip.start <= start and stop <= skip.stop for skip in self.skips)

    def with_skip(self, skip: Skip) -> "ChangeLog":
        """Return the change log with another skipped range; adjacent and overlapping ranges are merged."""
        apart = [s for s in self.skips if s.stop < skip.start or s.start > skip.stop]
        touching = [s for s in self.skips if s not in apart]
        start = min([skip.start, *(s.start for s in touching)])
        stop = max([skip.stop, *(s.stop for s in touching)])
        reasons = [reason for s in [*touching, skip] for reason in s.reason.split("; ") if reason]
        joined = Skip(start, stop, "; ".join(dict.fromkeys(reasons)))
        return replace(self, skips=tuple(sorted([*apart, joined], key=lambda s: s.start)))

    def until(self, step: int) -> "ChangeLog":
        """Return the change log of the steps before `step`, without planned entries."""
        batch = [self.batch[0], *(late for early, late in pairwise(self.batch) if early[1] != late[1])]
        return replace(
            self,
            batch=tuple(entry for entry in batch if entry[0] < step),
            length=tuple(entry for entry in self.lengths if entry[0] < step),
            mix=tuple(entry for entry in self.mixtures if entry[0] < step),
            grown=tuple(entry for entry in self.grown if entry[0] < step),
        )

    def settled(self, step: int) -> "ChangeLog":
        """Return the change log without redundant entries up to `step`."""
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
    """Insert an entry (step, value, ...), replacing one of the same step."""
    others = [other for other in entries if other[0] != entry[0]]
    return tuple(sorted([*others, entry], key=lambda other: other[0]))


def _shares(slots: MixtureSlots) -> MixtureSlots:
    return {name: count for name, count in slots.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change planned from the start; a setting that is None stays as it is."""

    step: int
    """First step at which it holds."""
    weights: Mapping[str, float] | None = None
    """Weight of every corpus."""
    global_batch_size: int | None = None
    """Rows per step over all ranks."""
    sequence_length: int | None = None
    """Tokens per row."""


def checked(schedule: Sequence[Change], names: Sequence[str]) -> tuple[Change, ...]:
    """Validate planned changes and return them in the order of steps, with plain Python numbers.

    Raises:
        ConfigError: a number is out of range, or weights miss a corpus or name an unknown one.
    """
    changes = []
    if not isinstance(schedule, Sequence) or not all(isinstance(change, Change) for change in schedule):
        raise ConfigError(
            "schedule must be a list of changes", got=schedule, fix="Write [Change(step=1000, weights=...)]."
        )
    for change in schedule:
        size, length = change.global_batch_size, change.sequence_length
        plain = replace(
            change,
            step=at_least(0, "step of a change", change.step),
            weights=None
            if change.weights is None
            else check_table("weights", change.weights, example="{'web': 1}"),
            global_batch_size=None if size is None else at_least(1, "global_batch_size", size, most=MAX_ROWS),
            sequence_length=None
            if length is None
            else at_least(2, "sequence_length", length, most=MAX_LENGTH),
        )
        if plain.weights is not None:
            slots_from(plain.weights, names)
        changes.append(plain)
    return tuple(sorted(changes, key=lambda change: change.step))


def planned(change_log: ChangeLog, changes: Sequence[Change], names: Sequence[str]) -> ChangeLog:
    """Return a change log with planned changes added.

    Args:
        names: the present corpora. A corpus without a weight in a change (added after it was planned) gets 0
            from there on; a weight for an absent corpus (removed since) is ignored. A planned mixture in
            which no present corpus has a weight is dropped.
    """
    for change in changes:
        if change.weights is not None:
            weights = {name: change.weights.get(name, 0.0) for name in names}
            if any(weights.values()):
                change_log = change_log.with_slots(change.step, slots_from(weights, names), "schedule")
        if change.global_batch_size is not None:
            change_log = change_log.with_batch_size(change.step, change.global_batch_size)
        if change.sequence_length is not None:
            change_log = change_log.with_length(change.step, change.sequence_length)
    return change_log


def planned_for(changes: Sequence[Change], step: int) -> list[list[Any]]:  # Any: JSON values
    """Return the changes planned for exactly one step, as JSON values."""
    return [
        [
            change.weights and {n: float(w) for n, w in change.weights.items()},
            change.global_batch_size,
            change.sequence_length,
        ]
        for change in changes
        if change.step == step
    ]

"""Epoch schedule of one corpus: full epochs, plus a remainder after a sequence-length change or a new part.

    FullEpochs       epochs over one token space, each with its own shuffle; the last entry is endless
    RemainderEpoch   the rest of an epoch after a change of the sequence length

A corpus that never changes has one endless entry. A corpus that grows is read part by part first, then
repeatedly as a whole. A change of the sequence length turns the epoch in progress into a RemainderEpoch:
pools that no row was served from are cut into rows of the new length; the documents that remain in the open
pools (one per lane) are packed again, see pool.py. No token is lost or repeated; if the new length does not
divide the rest of a pool, its last row is padded.

The schedule numbers the corpus's own samples from 0 at one sequence length. A *streamed* corpus is read while
`penstock data prepare` still writes it. Its parts are read one by one in the order in which they were
finished, so the order does not depend on the speed of the preparation. A part appended later is read by
itself after the epoch in progress, and as part of the whole from then on.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.order.holdout import Split, TokenSpace, part_of, space_of
from penstock.data.order.permutation import choose_geometry
from penstock.data.order.pool import WholePools
from penstock.data.order.round_robin import RoundRobin
from penstock.data.order.row_order import Order, RepackPoint, RowAddresses
from penstock.data.packing import PADDING_RULES
from penstock.data.types import Waste

if TYPE_CHECKING:
    from penstock.data.corpus.corpus import Corpus


@dataclass(frozen=True, slots=True)
class FullEpochs:
    """Consecutive epochs over one token space.

    Args:
        space: tokens of the epochs.
        order: shuffle of the token space; it is keyed by the epoch.
        first: number of the first epoch.
        epochs: number of epochs; None: endless.
        parts: number of parts the corpus must have before the first of these epochs can begin.
    """

    space: TokenSpace
    order: Order
    first: int = 0
    epochs: int | None = None
    parts: int = 1

    @property
    def identity(self) -> str:
        """Key of the entry's pools in caches, without the epoch; differs between entries of one corpus."""
        return self.order.identity

    @property
    def num_samples(self) -> int | None:
        """Rows of all epochs; None if endless."""
        return None if self.epochs is None else self.epochs * self.order.samples_per_epoch

    def locate(self, samples: Int64) -> RowAddresses:
        """Return the addresses of this entry's samples [n]."""
        return self.order.locate(samples + self.first * self.order.samples_per_epoch)

    def sample_of(self, epoch: int, pool: int, row: int) -> int:
        """Return the sample of this entry at a row address."""
        return self.order.sample_of(epoch - self.first, pool, row)

    def holds(self, pool: int) -> bool:  # noqa: ARG002
        """Return True: every pool has rows in a full epoch."""
        return True

    def repacks(self, pool: int) -> Sequence[RepackPoint]:  # noqa: ARG002
        """Return the sequence-length changes inside a pool: none in a full epoch."""
        return ()

    def waste(self, samples: int) -> Waste:
        """Return the padding and the left-out tokens of the first `samples` samples."""
        order = self.order
        epoch, inside = divmod(samples, order.samples_per_epoch)
        wasted = order.waste(order.num_pools) * epoch
        if inside:
            group = order.group_of(inside)
            wasted += order.waste(group * order.geometry.lanes)
            taken = order.turns_of(group).taken(inside - order.first_of(group))
            for pool, rows in zip(order.pools_of(group), taken, strict=True):
                wasted += order.waste_in(self.first + epoch, pool, rows)
        return wasted

    def remainder(self, samples: int, *, sequence_length: int) -> "RemainderEpoch | None":
        """Return the rest of the epoch in progress after `samples` samples; None between two epochs."""
        epoch, inside = divmod(samples, self.order.samples_per_epoch)
        if not inside:
            return None
        group = self.order.group_of(inside)
        rows = self.order.turns_of(group).taken(inside - self.order.first_of(group))
        repacks = [(RepackPoint(self.order.geometry.sequence_length, count),) for count in rows]
        return RemainderEpoch(
            self.space, self.order.at_length(sequence_length), self.first + epoch, group, repacks
        )


class RemainderEpoch:
    """Rest of an epoch after a sequence-length change, from the group of open pools on.

    Args:
        order: shuffle of the epoch, at the new sequence length.
        epoch: number of the epoch.
        group: number of the group of open pools.
        repacks: [lanes] for each open pool, the rows consumed before each sequence-length change.
    """

    def __init__(
        self,
        space: TokenSpace,
        order: Order,
        epoch: int,
        group: int,
        repacks: Sequence[Sequence[RepackPoint]],
    ) -> None:
        self.space = space
        self.order = order
        self.first = epoch
        self.epochs = 1
        changes = [[(repack.sequence_length, repack.rows) for repack in of_lane] for of_lane in repacks]
        self.identity = f"{order.identity} {group} {changes}"
        """Key of the entry's pools in caches, without the epoch; differs between entries of one corpus."""
        self._group = group
        self._repacks = repacks
        begun = zip(order.pools_of(group), repacks, strict=True)
        self._left = [order.rows_left(epoch, pool, changes) for pool, changes in begun]
        self._turns = RoundRobin(self._left)
        last = group == (order.num_pools - 1) // order.geometry.lanes
        self._later = order.samples_per_epoch if last else order.first_of(group + 1)
        self.num_samples = self._turns.num_samples + max(0, order.samples_per_epoch - self._later)

    def locate(self, samples: Int64) -> RowAddresses:
        """Return the addresses of this entry's samples [n]."""
        begun = samples < self._turns.num_samples
        addresses = self.order.locate(np.where(begun, 0, samples - self._turns.num_samples + self._later))
        lane, row = self._turns.locate(samples[begun])
        addresses.lane[begun], addresses.row[begun] = lane, row
        addresses.pool[begun] = self._group * self.order.geometry.lanes + lane
        addresses.epoch[:] = self.first
        return addresses

    def sample_of(self, epoch: int, pool: int, row: int) -> int:  # noqa: ARG002
        """Return the sample of this entry at a row address; its pool must have rows in this entry."""
        group, lane = divmod(pool, self.order.geometry.lanes)
        if group == self._group:
            return self._turns.sample_of(lane, row)
        return self.order.sample_of(0, pool, row) - self._later + self._turns.num_samples

    def holds(self, pool: int) -> bool:
        """Return True if a pool has rows in this entry, False if it was used up before."""
        group, lane = divmod(pool, self.order.geometry.lanes)
        return group > self._group or (group == self._group and self._left[lane] > 0)

    def repacks(self, pool: int) -> Sequence[RepackPoint]:
        """Return the sequence-length changes inside a pool, oldest first."""
        group, lane = divmod(pool, self.order.geometry.lanes)
        return self._repacks[lane] if group == self._group else ()

    @property
    def repacked_rows(self) -> int:
        """Rows packed from the rest of the open pools."""
        return self._turns.num_samples

    def waste(self, samples: int) -> Waste:
        """Return the padding and the left-out tokens of the first `samples` samples."""
        pools, taken = self.order.pools_of(self._group), self._turns.taken(samples)
        wasted = Waste()
        for pool, rows, repacks in zip(pools, taken, self._repacks, strict=True):
            wasted += self.order.waste_in(self.first, pool, rows, repacks)
        if samples <= self.repacked_rows:
            return wasted
        passed = FullEpochs(self.space, self.order, self.first, 1)
        return wasted + passed.waste(samples - self.repacked_rows + self._later) - passed.waste(self._later)

    def remainder(self, samples: int, *, sequence_length: int) -> "RemainderEpoch | None":
        """Return the rest of this entry after `samples` samples, at another sequence length."""
        order = self.order.at_length(sequence_length)
        if samples < self._turns.num_samples:
            taken = self._turns.taken(samples)
            repacks = [
                (*repack, RepackPoint(self.order.geometry.sequence_length, rows))
                for repack, rows in zip(self._repacks, taken, strict=True)
            ]
            return RemainderEpoch(self.space, order, self.first, self._group, repacks)
        passed = FullEpochs(self.space, self.order, self.first, 1)
        return passed.remainder(
            samples - self._turns.num_samples + self._later, sequence_length=sequence_length
        )


EpochEntry = FullEpochs | RemainderEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """Shuffle key and sizes of one corpus."""

    name: str
    seed: int
    sequence_length: int
    longest: int
    """Largest sequence length planned for the run; blocks are sized for it."""
    split: Split
    holdout: float
    streamed: bool
    """True if the first epoch is read part by part while the corpus is prepared."""
    packing: str
    """Packing rule, a name in PACKERS."""
    overlong: str | None = None
    """Packing "whole": "truncate" or "drop" documents longer than a row. None: refuse them."""
    base_parts: int
    """Parts the corpus had when the run began; 0 for a streamed corpus."""

    def whole(self, corpus: "Corpus", parts: int, *, first: int) -> FullEpochs:
        """Return endless epochs over the first `parts` parts of a corpus."""
        space = part_of(corpus, name=self.name, split=self.split, holdout=self.holdout, parts=range(parts))
        return FullEpochs(space, self._order(space, self.name), first, None, parts=parts)

    def part(self, corpus: "Corpus", part: int) -> FullEpochs | None:
        """Return one epoch over a single part; None if the split has no document of it."""
        parts = range(part, part + 1)
        space = space_of(corpus, name=self.name, split=self.split, holdout=self.holdout, parts=parts)
        if not space.num_tokens:
            return None
        return FullEpochs(space, self._order(space, f"{self.name}\0{part}"), 0, 1, parts=part + 1)

    def remaining_epochs(self, entry: FullEpochs, *, begun: int) -> list[FullEpochs]:
        """Return the epochs of an entry that have not begun, reordered for this config's sequence length."""
        if entry.epochs is not None and begun >= entry.epochs:
            return []
        epochs = None if entry.epochs is None else entry.epochs - begun
        order = self._order(entry.space, entry.order.name)
        return [replace(entry, order=order, first=entry.first + begun, epochs=epochs)]

    def _order(self, space: TokenSpace, name: str) -> Order:
        length = self.sequence_length
        geometry = choose_geometry(space.num_tokens, sequence_length=length, longest=self.longest)
        if self.packing not in PADDING_RULES:
            return Order(space.num_tokens, geometry, name=name, seed=self.seed)
        counter = WholePools(space, self.packing, self.overlong)
        order = Order(space.num_tokens, geometry, name=name, seed=self.seed, counter=counter)
        counter.check(order)
        return order


class CorpusEpochs:
    """Epoch schedule of one corpus at one sequence length: a list of entries in reading order.

    Args:
        entries: full epochs; only the first one may be a RemainderEpoch.
        parts: parts of the corpus that this schedule and earlier ones cover.
        begun: parts that were begun before this schedule.
    """

    def __init__(
        self, plan: OrderConfig, entries: Sequence[EpochEntry], *, parts: int, begun: int = 0
    ) -> None:
        self.plan = plan
        self.entries = list(entries)
        self.parts = parts
        self._begun = begun
        ends = np.cumsum([0, *(entry.num_samples for entry in entries if entry.num_samples is not None)])
        self.firsts: list[int] = ends.tolist()
        """First sample of each entry; if the last entry has an end, also the first sample after it."""

    @property
    def ends(self) -> int | None:
        """Samples until the schedule ends; None if it is endless."""
        return None if self.entries and self.entries[-1].num_samples is None else self.firsts[-1]

    def entry_of(self, sample: int) -> int:
        """Return the index of the entry that contains a sample."""
        return bisect_right(self.firsts, sample) - 1

    def waste(self, samples: int) -> Waste:
        """Return the padding and the left-out tokens of the first `samples` samples."""
        wasted = Waste()
        for index, entry in enumerate(self.entries):
            inside = max(0, samples - self.firsts[index])
            wasted += entry.waste(inside if entry.num_samples is None else min(inside, entry.num_samples))
        return wasted

    def max_samples(self, epochs: int) -> int | None:
        """Return the samples up to the end of epoch `epochs`; None if not known yet (a streamed corpus)."""
        if self.ends is not None:
            return None
        last, first = self.entries[-1], self.firsts[len(self.entries) - 1]
        return first + max(0, epochs - last.first) * last.order.samples_per_epoch

    def samples_of_epochs(self, epochs: float) -> float:
        """Return the samples until a number of epochs has passed, counted from the run's first.

        The schedule must be endless. Negative if they passed before it.
        """
        last, first = self.entries[-1], self.firsts[len(self.entries) - 1]
        return first + (epochs - last.first) * last.order.samples_per_epoch

    def parts_begun(self, samples: int) -> int:
        """Return the number of parts begun by earlier schedules and by `samples` samples of this one."""
        begun = [
            entry.parts
            for entry, first in zip(self.entries, self.firsts, strict=False)
            if isinstance(entry, FullEpochs) and first < samples
        ]
        return max([self._begun, *begun])

    def at_length(self, samples: int, sequence_length: int) -> "CorpusEpochs":
        """Return the schedule that continues after `samples` samples at another sequence length."""
        plan = replace(self.plan, sequence_length=sequence_length)
        index = self.entry_of(samples)
        entries: list[EpochEntry] = []
        for entry in self.entries[index : index + 1]:
            inside = samples - self.firsts[index]
            if remainder := entry.remainder(inside, sequence_length=sequence_length):
                entries.append(remainder)
            if isinstance(entry, FullEpochs):
                entries += plan.remaining_epochs(entry, begun=-(-inside // entry.order.samples_per_epoch))
        for entry in self.entries[index + 1 :]:
            assert isinstance(entry, FullEpochs), entry  # only the first entry can be a remainder
            entries += plan.remaining_epochs(entry, begun=0)
        return CorpusEpochs(plan, entries, parts=self.parts, begun=self.parts_begun(samples))

    def grown(self, samples: int, corpus: "Corpus", parts: int) -> "CorpusEpochs":
        """Return the schedule with more parts, appended to the corpus after `samples` samples."""
        if parts <= self.parts:
            return self
        last, first = self.entries[-1], self.firsts[len(self.entries) - 1]
        assert isinstance(last, FullEpochs), last  # the endless one
        begun = max(0, -(-(samples - first) // last.order.samples_per_epoch))
        epoch = last.first + begun
        entries = self.entries[:-1]
        if begun:
            entries.append(replace(last, epochs=begun))
        if epoch:
            entries += self._parts(corpus, parts)
        entries.append(self.plan.whole(corpus, parts, first=epoch))
        return CorpusEpochs(self.plan, entries, parts=parts, begun=self._begun)

    def streamed(self, corpus: "Corpus", parts: int) -> "CorpusEpochs":
        """Return the schedule of a streamed corpus with more of its parts; it still has an end."""
        entries = [*self.entries, *self._parts(corpus, parts)]
        return CorpusEpochs(self.plan, entries, parts=parts, begun=self._begun)

    def finished(self, corpus: "Corpus") -> "CorpusEpochs":
        """Return the schedule of a streamed corpus that is complete: endless epochs over the whole follow."""
        entries = [*self.entries, self.plan.whole(corpus, self.parts, first=1)]
        return CorpusEpochs(self.plan, entries, parts=self.parts, begun=self._begun)

    def _parts(self, corpus: "Corpus", parts: int) -> list[FullEpochs]:
        entries = [self.plan.part(corpus, part) for part in range(self.parts, parts)]
        return [entry for entry in entries if entry is not None]


def begin(plan: OrderConfig, corpus: "Corpus") -> CorpusEpochs:
    """Return the epoch schedule of a corpus at the start of a run."""
    if plan.streamed:
        return CorpusEpochs(plan, [], parts=0)
    return CorpusEpochs(plan, [plan.whole(corpus, plan.base_parts, first=0)], parts=plan.base_parts)

"""The way of one corpus through its tokens, as a short list of legs.

    Passes   epochs over a token space, each in an order of its own; the last leg of a way has no end
    Rest     what is left of an epoch after a change of the sequence length

A corpus that is only read is one endless leg. One that grows is read part by part and then over and
over as a whole. A change of the sequence length turns the epoch under way into a Rest: pools that no
row was taken from yet are cut into rows of the new length; of the pools under way, one a lane, what is
left is packed anew (see pool.py). No token is lost or repeated; a pool whose rest the new length does not
divide ends in a padded row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.data.holdout import TokenSpace
from penstock.data.order import Cut, Order, Places
from penstock.data.turns import Turns
from penstock.data.types import Int64, Waste


@dataclass(frozen=True, slots=True)
class Passes:
    """Epochs of one order.

    Args:
        first: number of the first epoch; it keys the order.
        epochs: how many; None: without end.
        parts: how many parts of the corpus there must be before this leg can begin.
    """

    space: TokenSpace
    order: Order
    first: int = 0
    epochs: int | None = None
    parts: int = 1

    @property
    def identity(self) -> str:
        """What tells its pools from those of other legs of the corpus, but for the epoch."""
        return self.order.identity

    @property
    def num_samples(self) -> int | None:
        """Rows in all, or None when there is no end."""
        return None if self.epochs is None else self.epochs * self.order.samples_per_epoch

    def locate(self, samples: Int64) -> Places:
        """Return the places of this leg's samples [n]."""
        return self.order.locate(samples + self.first * self.order.samples_per_epoch)

    def sample_of(self, epoch: int, pool: int, row: int) -> int:
        """Return the sample of this leg at a place."""
        return self.order.sample_of(epoch - self.first, pool, row)

    def holds(self, pool: int) -> bool:  # noqa: ARG002
        """Return whether a pool has rows on this leg: every one does."""
        return True

    def cuts(self, pool: int) -> Sequence[Cut]:  # noqa: ARG002
        """Return the changes of length inside a pool: none."""
        return ()

    def waste(self, samples: int) -> Waste:
        """Return what the first samples of this leg waste."""
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

    def rest(self, samples: int, *, sequence_length: int) -> "Rest | None":
        """Return what is left of the epoch under way after so many samples; None between two epochs."""
        epoch, inside = divmod(samples, self.order.samples_per_epoch)
        if not inside:
            return None
        group = self.order.group_of(inside)
        rows = self.order.turns_of(group).taken(inside - self.order.first_of(group))
        cuts = [(Cut(self.order.geometry.sequence_length, count),) for count in rows]
        return Rest(self.space, self.order.at_length(sequence_length), self.first + epoch, group, cuts)


class Rest:
    """What is left of an epoch, from the pools under way on.

    Args:
        order: of the epoch, at the new sequence length.
        group: number of the group of pools under way.
        cuts: for each lane of the group, what was consumed of its pool, change by change.
    """

    def __init__(
        self, space: TokenSpace, order: Order, epoch: int, group: int, cuts: Sequence[Sequence[Cut]]
    ) -> None:
        self.space = space
        self.order = order
        self.first = epoch
        self.epochs = 1
        changes = [[(cut.sequence_length, cut.rows) for cut in of_lane] for of_lane in cuts]
        self.identity = f"{order.identity} {group} {changes}"
        """What tells its pools from those of other legs of the corpus, but for the epoch."""
        self._group = group
        self._cuts = cuts
        begun = zip(order.pools_of(group), cuts, strict=True)
        self._left = [order.rows_left(epoch, pool, changes) for pool, changes in begun]
        self._turns = Turns(self._left)
        last = group == (order.num_pools - 1) // order.geometry.lanes
        self._later = order.samples_per_epoch if last else order.first_of(group + 1)
        self.num_samples = self._turns.num_samples + max(0, order.samples_per_epoch - self._later)

    def locate(self, samples: Int64) -> Places:
        """Return the places of this leg's samples [n]."""
        begun = samples < self._turns.num_samples
        places = self.order.locate(np.where(begun, 0, samples - self._turns.num_samples + self._later))
        lane, row = self._turns.locate(samples[begun])
        places.lane[begun], places.row[begun] = lane, row
        places.pool[begun] = self._group * self.order.geometry.lanes + lane
        places.epoch[:] = self.first
        return places

    def sample_of(self, epoch: int, pool: int, row: int) -> int:  # noqa: ARG002
        """Return the sample of this leg at a place of a pool that it holds."""
        group, lane = divmod(pool, self.order.geometry.lanes)
        if group == self._group:
            return self._turns.sample_of(lane, row)
        return self.order.sample_of(0, pool, row) - self._later + self._turns.num_samples

    def holds(self, pool: int) -> bool:
        """Return whether a pool has rows on this leg: not when it was used up before."""
        group, lane = divmod(pool, self.order.geometry.lanes)
        return group > self._group or (group == self._group and self._left[lane] > 0)

    def cuts(self, pool: int) -> Sequence[Cut]:
        """Return the changes of length inside a pool."""
        group, lane = divmod(pool, self.order.geometry.lanes)
        return self._cuts[lane] if group == self._group else ()

    @property
    def recut(self) -> int:
        """Rows that what was left of the pools under way makes."""
        return self._turns.num_samples

    def waste(self, samples: int) -> Waste:
        """Return what the first samples of this leg waste."""
        pools, taken = self.order.pools_of(self._group), self._turns.taken(samples)
        wasted = Waste()
        for pool, rows, cuts in zip(pools, taken, self._cuts, strict=True):
            wasted += self.order.waste_in(self.first, pool, rows, cuts)
        if samples <= self.recut:
            return wasted
        passed = Passes(self.space, self.order, self.first, 1)
        return wasted + passed.waste(samples - self.recut + self._later) - passed.waste(self._later)

    def rest(self, samples: int, *, sequence_length: int) -> "Rest | None":
        """Return what is left of this leg after so many samples, at another length."""
        order = self.order.at_length(sequence_length)
        if samples < self._turns.num_samples:
            taken = self._turns.taken(samples)
            cuts = [
                (*cut, Cut(self.order.geometry.sequence_length, rows))
                for cut, rows in zip(self._cuts, taken, strict=True)
            ]
            return Rest(self.space, order, self.first, self._group, cuts)
        passed = Passes(self.space, self.order, self.first, 1)
        return passed.rest(samples - self._turns.num_samples + self._later, sequence_length=sequence_length)


Leg = Passes | Rest

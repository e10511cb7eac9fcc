"""The way of one corpus: its legs in order, and how a change of length or a new part alters it.

A way counts the corpus's own samples from 0 at the sequence length it was made for. A corpus is read as a
whole, epoch after epoch; one that is *streamed*, that is read while it is still being prepared, is read
part by part first, in the order the parts were finished, so that what is read never depends on how far
the preparation had come. Parts that are appended later are read by themselves as soon as the epoch
under way ends, and as part of the whole from then on.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.data.corpus import Corpus
from penstock.data.geometry import choose_geometry
from penstock.data.holdout import Split, TokenSpace, part_of, space_of
from penstock.data.legs import Leg, Passes
from penstock.data.order import Order
from penstock.data.types import Waste
from penstock.data.whole_pool import WholePools


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What keys and sizes the order of a corpus."""

    name: str
    seed: int
    sequence_length: int
    longest: int
    """The largest sequence length the run is known to come to."""
    split: Split
    holdout: float
    streamed: bool
    """Whether the first epoch goes part by part."""
    overlong: str | None = None
    """What is done with documents longer than a row, where none is split; None: documents are split."""
    base_parts: int
    """Parts the corpus had when the run began; 0 for a streamed one."""

    def whole(self, corpus: Corpus, parts: int, *, first: int) -> Passes:
        """Return endless epochs over the first parts of a corpus."""
        space = part_of(corpus, name=self.name, split=self.split, holdout=self.holdout, parts=range(parts))
        return Passes(space, self._order(space, self.name), first, None, parts=parts)

    def part(self, corpus: Corpus, part: int) -> Passes | None:
        """Return one pass over a part, in an order of its own; None where the split has none of it."""
        parts = range(part, part + 1)
        space = space_of(corpus, name=self.name, split=self.split, holdout=self.holdout, parts=parts)
        if not space.num_tokens:
            return None
        return Passes(space, self._order(space, f"{self.name}\0{part}"), 0, 1, parts=part + 1)

    def again(self, leg: Passes, *, begun: int) -> list[Passes]:
        """Return the epochs of a leg that are not begun yet, at this plan's sequence length."""
        if leg.epochs is not None and begun >= leg.epochs:
            return []
        epochs = None if leg.epochs is None else leg.epochs - begun
        order = self._order(leg.space, leg.order.name)
        return [replace(leg, order=order, first=leg.first + begun, epochs=epochs)]

    def _order(self, space: TokenSpace, name: str) -> Order:
        length = self.sequence_length
        geometry = choose_geometry(space.num_tokens, sequence_length=length, longest=self.longest)
        counter = None if self.overlong is None else WholePools(space, self.overlong)
        return Order(space.num_tokens, geometry, name=name, seed=self.seed, counter=counter)


class Way:
    """The legs of a corpus at one sequence length.

    Args:
        parts: parts of the corpus that the legs, and those of ways before this one, cover.
        begun: parts that were begun on ways before this one.
    """

    def __init__(self, plan: Plan, legs: Sequence[Leg], *, parts: int, begun: int = 0) -> None:
        self.plan = plan
        self.legs = list(legs)
        self.parts = parts
        self._begun = begun
        ends = np.cumsum([0, *(leg.num_samples for leg in legs if leg.num_samples is not None)])
        self.firsts: list[int] = ends.tolist()
        """First sample of each leg, and of the next one to come where the last leg has an end."""

    @property
    def ends(self) -> int | None:
        """Samples until the legs end, or None when they never do."""
        return None if self.legs and self.legs[-1].num_samples is None else self.firsts[-1]

    def leg_of(self, sample: int) -> int:
        """Return the index of the leg that holds a sample."""
        return bisect_right(self.firsts, sample) - 1

    def waste(self, samples: int) -> Waste:
        """Return what the first samples of this way waste."""
        wasted = Waste()
        for index, leg in enumerate(self.legs):
            inside = max(0, samples - self.firsts[index])
            wasted += leg.waste(inside if leg.num_samples is None else min(inside, leg.num_samples))
        return wasted

    def max_samples(self, epochs: int) -> int | None:
        """Return how many samples so many epochs are, from where the way begins; None: not yet known."""
        if self.ends is not None:
            return None
        last, first = self.legs[-1], self.firsts[len(self.legs) - 1]
        return first + max(0, epochs - last.first) * last.order.samples_per_epoch

    def parts_begun(self, samples: int) -> int:
        """Return how many parts the first samples of this way, and the ways before it, begin."""
        begun = [
            leg.parts
            for leg, first in zip(self.legs, self.firsts, strict=False)
            if isinstance(leg, Passes) and first < samples
        ]
        return max([self._begun, *begun])

    def at_length(self, samples: int, sequence_length: int) -> "Way":
        """Return the way from a sample on, at another sequence length."""
        plan = replace(self.plan, sequence_length=sequence_length)
        index = self.leg_of(samples)
        legs: list[Leg] = []
        for leg in self.legs[index : index + 1]:
            inside = samples - self.firsts[index]
            if rest := leg.rest(inside, sequence_length=sequence_length):
                legs.append(rest)
            if isinstance(leg, Passes):
                legs += plan.again(leg, begun=-(-inside // leg.order.samples_per_epoch))
        for leg in self.legs[index + 1 :]:
            assert isinstance(leg, Passes), leg  # a rest can only come first
            legs += plan.again(leg, begun=0)
        return Way(plan, legs, parts=self.parts, begun=self.parts_begun(samples))

    def grown(self, samples: int, corpus: Corpus, parts: int) -> "Way":
        """Return the way with more parts of the corpus, decided on after so many samples."""
        if parts <= self.parts:
            return self
        last, first = self.legs[-1], self.firsts[len(self.legs) - 1]
        assert isinstance(last, Passes), last  # the endless one
        begun = max(0, -(-(samples - first) // last.order.samples_per_epoch))
        epoch = last.first + begun
        legs = self.legs[:-1]
        if begun:
            legs.append(replace(last, epochs=begun))
        if epoch:
            legs += self._parts(corpus, parts)
        legs.append(self.plan.whole(corpus, parts, first=epoch))
        return Way(self.plan, legs, parts=parts, begun=self._begun)

    def streamed(self, corpus: Corpus, parts: int) -> "Way":
        """Return the way of a streamed corpus with more of its parts, still without an end."""
        legs = [*self.legs, *self._parts(corpus, parts)]
        return Way(self.plan, legs, parts=parts, begun=self._begun)

    def finished(self, corpus: Corpus) -> "Way":
        """Return the way of a streamed corpus that has all its parts: from now on, the whole."""
        legs = [*self.legs, self.plan.whole(corpus, self.parts, first=1)]
        return Way(self.plan, legs, parts=self.parts, begun=self._begun)

    def _parts(self, corpus: Corpus, parts: int) -> list[Passes]:
        legs = [self.plan.part(corpus, part) for part in range(self.parts, parts)]
        return [leg for leg in legs if leg is not None]


def begin(plan: Plan, corpus: Corpus) -> Way:
    """Return the way of a corpus from its first sample on."""
    if plan.streamed:
        return Way(plan, [], parts=0)
    return Way(plan, [plan.whole(corpus, plan.base_parts, first=0)], parts=plan.base_parts)

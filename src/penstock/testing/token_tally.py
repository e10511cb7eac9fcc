"""Compare what a loader served with what it should have: tokens lost, repeated, out of place."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.data.types import Int64


@dataclass(frozen=True, slots=True)
class Tally:
    """How two multisets of token identities differ."""

    lost: int
    """Tokens expected and not served, each as often as it is missing."""
    repeated: int
    """Tokens expected and served too often, each as often as it is too many."""
    foreign: int
    """Tokens served that nobody expected."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.foreign)

    def __str__(self) -> str:
        foreign = f", and {self.foreign:,} served that were not expected" if self.foreign else ""
        return f"{self.lost:,} tokens lost and {self.repeated:,} repeated{foreign}"


def joined(arrays: Iterable[npt.ArrayLike]) -> Int64:
    """Return the identities of several batches as one array [n] int64."""
    flat = [np.asarray(array, dtype=np.int64).ravel() for array in arrays]
    return np.concatenate([np.zeros(0, dtype=np.int64), *flat])


def tally(expected: npt.ArrayLike, served: npt.ArrayLike) -> Tally:
    """Return how the tokens served differ from those expected; their order does not matter.

    >>> str(tally([1, 2, 3], [1, 1, 3, 9]))
    '1 tokens lost and 1 repeated, and 1 served that were not expected'
    """
    wanted, found = joined([expected]), joined([served])
    names, place = np.unique(np.concatenate((wanted, found)), return_inverse=True)
    should = np.bincount(place[: len(wanted)], minlength=len(names))
    did = np.bincount(place[len(wanted) :], minlength=len(names))
    known = should > 0
    return Tally(
        lost=int((should - did).clip(min=0).sum()),
        repeated=int((did - should)[known].clip(min=0).sum()),
        foreign=int(did[~known].sum()),
    )


def first_difference(expected: Sequence[npt.ArrayLike], served: Sequence[npt.ArrayLike]) -> int | None:
    """Return the first batch that is not the one expected, or None."""
    for number, (ours, theirs) in enumerate(zip(expected, served, strict=False)):
        if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
            return number
    return None if len(expected) == len(served) else min(len(expected), len(served))

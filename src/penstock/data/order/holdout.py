"""Held-out split: a training part and a held-out part of a corpus that share no document.

The corpus is cut into up to 4,096 equal blocks; a keyed permutation picks the held-out ones, and the
documents that *start* in a picked block are held out whole. The choice depends only on the corpus's name and
size, not on seed, sequence length or ranks, so runs that differ in those are validated on the same text. At
most 4,096 intervals describe a part of any size.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np

from penstock.core.arrays import Bool, Int64
from penstock.core.errors import ConfigError, nearest
from penstock.core.rng import key_of
from penstock.core.units import plural
from penstock.data.order.permutation import Permutation
from penstock.data.types import Fragments

if TYPE_CHECKING:
    from penstock.data.corpus.corpus import Corpus

_MAX_BLOCKS = 4096
_MIN_BLOCK_TOKENS = 256

Split = Literal["train", "heldout"]

# Held-out intervals by span, share and key of each corpus: computing them reads document offsets everywhere.
_known: "WeakKeyDictionary[Corpus, dict[tuple[int, int, float, int], Int64]]" = WeakKeyDictionary()


class TokenSpace:
    """Part of a corpus as tokens [0, num_tokens): some of its intervals, concatenated.

    Args:
        intervals: [n, 2] int64 corpus positions, ascending, each a whole number of documents.
    """

    def __init__(self, corpus: "Corpus", intervals: Int64) -> None:
        self.corpus = corpus
        self._interval_stops: list[int] = intervals[:, 1].tolist()
        self._ends: list[int] = np.cumsum(intervals[:, 1] - intervals[:, 0]).tolist()
        self.num_tokens = self._ends[-1] if self._ends else 0
        self.key = hash((tuple(self._interval_stops), tuple(self._ends)))
        """Cache key of this part, unique among the parts of the corpus in this process."""

    def fragments(self, ranges: Sequence[tuple[int, int]]) -> Fragments:
        """Cut ranges of this space at document ends; the fragments' starts are *corpus* positions."""
        return self.corpus.fragments(self.in_corpus(ranges))

    def documents(self, ranges: Sequence[tuple[int, int]]) -> Fragments:
        """Return the whole documents that start in ranges of this space."""
        corpus = self.corpus
        found = [
            (corpus.next_document(start), corpus.next_document(stop))
            for start, stop in self.in_corpus(ranges)
        ]
        return corpus.fragments([(start, stop) for start, stop in found if start < stop])

    def in_corpus(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return ranges of this space as ranges of corpus positions."""
        return [part for start, stop in ranges for part in self._in_corpus(start, stop)]

    def locate(self, positions: Int64) -> tuple[Int64, Bool]:
        """Return corpus positions (any shape) as positions in this space, and a mask of those inside it."""
        stops, ends = np.array(self._interval_stops), np.array(self._ends)
        index = np.searchsorted(stops, positions, side="right")
        is_inside = index < len(stops)
        index[~is_inside] = 0
        inside = positions - (stops - ends)[index]
        is_inside &= inside >= np.concatenate(([0], ends[:-1]))[index]
        return np.where(is_inside, inside, 0), is_inside

    def positions_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of this space for corpus positions [start, stop); empty if none is inside."""
        found = []
        index = bisect_right(self._interval_stops, start)
        while index < len(self._ends):
            shift = self._interval_stops[index] - self._ends[index]
            first = (self._ends[index - 1] if index else 0) + shift
            if first >= stop:
                break
            found.append((max(start, first) - shift, min(stop, self._interval_stops[index]) - shift))
            index += 1
        return found

    def _in_corpus(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        index = bisect_right(self._ends, start)
        while start < stop:
            shift = self._interval_stops[index] - self._ends[index]  # from this space to the corpus
            until = min(stop, self._ends[index])
            yield start + shift, until + shift
            start = until
            index += 1


def part_of(
    corpus: "Corpus", *, name: str, split: Split, holdout: float, parts: range | None = None
) -> TokenSpace:
    """Return the training or held-out part of a corpus.

    Args:
        name: the corpus's name in the mixture; keys the choice.
        holdout: share of the tokens to hold out, in [0, 0.5], rounded to whole documents. Each part of a
            corpus that grows is split by itself, so held-out documents stay held out.
        parts: parts of the corpus; None: all.

    Raises:
        ConfigError: the share is out of range, the split does not exist, or it has no document.
    """
    space = space_of(corpus, name=name, split=split, holdout=holdout, parts=parts)
    if not space.num_tokens:
        raise ConfigError(
            f"A holdout of {holdout} leaves the {split} part of corpus {name!r} empty",
            fix=_remedy(corpus, split, holdout),
        )
    return space


def _remedy(corpus: "Corpus", split: Split, holdout: float) -> str:
    documents, tokens = plural(corpus.num_documents, "document"), plural(corpus.num_tokens, "token")
    size = f"The corpus has {documents} of {tokens}"
    if split == "train":
        return f"{size}. Set a smaller data.holdout."
    least = 50 // _num_blocks(corpus.num_tokens) / 100 + 0.01  # count of blocks is rounded
    if holdout < least <= 0.5:
        return f"{size}. Set data.holdout to {least:.2f} or more, or to 0 without validation."
    return f"{size}, too few to hold any out. Set data.holdout to 0 and leave out validation."


def _num_blocks(num_tokens: int) -> int:
    return max(1, min(_MAX_BLOCKS, num_tokens // _MIN_BLOCK_TOKENS))


def space_of(corpus: "Corpus", *, name: str, split: Split, holdout: float, parts: range | None) -> TokenSpace:
    """Return the training or held-out part of some parts of a corpus; it may be empty.

    Raises:
        ConfigError: the share is out of range, or the split does not exist.
    """
    if split not in get_args(Split):
        raise ConfigError("A corpus has no such split", got=split, fix=nearest(split, list(get_args(Split))))
    if not 0 <= holdout <= 0.5:
        raise ConfigError("holdout must be a share between 0 and 0.5", got=holdout)
    edges = [0, *corpus.part_ends]
    chosen = range(len(edges) - 1) if parts is None else parts
    intervals = [
        _intervals(corpus, (edges[part], edges[part + 1]), split, holdout, key=_key(name, part))
        for part in chosen
    ]
    return TokenSpace(corpus, np.concatenate(intervals))


def _key(name: str, part: int) -> int:
    return key_of(0, "holdout", name, *([part] if part else []))


def _intervals(corpus: "Corpus", span: tuple[int, int], split: Split, holdout: float, *, key: int) -> Int64:
    """Return the intervals [n, 2] of one side of the split within a span of the corpus."""
    known = _known.setdefault(corpus, {})
    heldout = known.get((*span, holdout, key))
    if heldout is None:
        heldout = known[*span, holdout, key] = _heldout_intervals(corpus, span, holdout=holdout, key=key)
    if split == "heldout":
        return heldout
    edges = np.concatenate(([span[0]], heldout.reshape(-1), [span[1]])).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]


def _heldout_intervals(corpus: "Corpus", span: tuple[int, int], *, holdout: float, key: int) -> Int64:
    first, total = span[0], span[1] - span[0]
    num_blocks = _num_blocks(total)
    count = round(holdout * num_blocks)
    picked = Permutation(num_blocks, key=key)(np.arange(count))
    edges = []
    for block in np.sort(picked).tolist():
        start = corpus.next_document(first + block * total // num_blocks)
        stop = corpus.next_document(first + (block + 1) * total // num_blocks)
        if start < stop:
            edges.append((start, stop))
    return np.array(edges, dtype=np.int64).reshape(-1, 2)

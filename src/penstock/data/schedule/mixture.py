"""Mixture: global sample index -> (corpus, its own sample index), with near-exact shares at every prefix.

A mixture of small integers (weights in thousandths, and all mixtures of states saved before trees were added)
is a *pattern* that repeats. It is laid out by Tijdeman's rule (R. Tijdeman, "The chairman assignment
problem", Discrete Mathematics 32, 1980), so every prefix holds each corpus's exact share to within one
sample. Locating a sample is one look-up.

Any other mixture is a *tree*. Its weights are integers that sum to at most 2**62. The leaves of a binary tree
are the corpora; the left child of a node takes floor(n*p + 1/2) of the node's first n samples, where p is its
share of the node's weight, rounded to 64 bits. The child of a sample, and the sample's number there, take one
product of 64 by 64 bits. The tree is Huffman's, so a sample takes at most 1 + log2(corpora) of them on
average.

Every prefix of the first 2**50 samples holds each corpus's exact share to within *two samples*:

- Let v_1, ..., v_k be the nodes from a child of the root down to a leaf, w_i the weight of v_i, and e_i the
  number of samples at v_i minus its exact share. A left child adds the rounding error, at most 1/2, and its
  sibling, which gets the rest, the same with the opposite sign: |e_i| <= 1/2 + |e_(i-1)| * w_i / w_(i-1),
  and the root has no error. So |e_k| <= 1/2 * (w_k/w_k + w_k/w_(k-1) + ... + w_k/w_1).
- Huffman's algorithm joins the two lightest nodes, and the weights that it joins never decrease. So the
sibling
  of a node made of a and b weighs at least as much as a and as b, and at least half of that node. Hence above
  a leaf's parent each node weighs at least 3/2 of the one below it, and the leaf's grandparent at least twice
  the leaf. The sum is below 1 + 1 + 1/2 * (1 + 2/3 + 4/9 + ...) = 3.5, and |e_k| < 1.75.
- The error of a rounded weight is below 2**-62, and for the largest one, which compensates for all that were
  raised from 0, below 2**-62 per corpus; that of p at a node of n samples is 2**-65, which adds n * 2**-65 to
  its error, in all less than 3.5 * 2**-65 per sample. With 500 corpora this is below 1/8 of a sample in
  2**50.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Int64
from penstock.core.checks import check_table, number
from penstock.core.errors import ConfigError, nearest

UInt64 = npt.NDArray[np.uint64]

PATTERN_SLOTS = 65_536
"""Largest pattern for weights in thousandths; a mixture that needs more slots becomes a tree."""

UNITS = 2**62
"""Largest sum of a mixture's integer weights."""

_LONGEST_PATTERN = 2**17  # slots of the longest pattern in any saved state


def slots_of(weights: Mapping[str, float]) -> dict[str, int]:
    """Convert weights to integers: largest remainder, at least 1 for a weight above zero.

    They are divided by their greatest common divisor, so equal mixtures have equal numbers. Weights of at
    most three decimals, and all whose numbers sum to 2**62 or less, are exact; others are rounded to 2**-62.
    If every weight is within a relative 1e-12 of such a decimal (0.1 + 0.2, for example), decimals are used.

    Raises:
        ConfigError: a weight is negative or not finite, or all are zero.


    >>> slots_of({"web": 3, "code": 1})
    {'web': 3, 'code': 1}
    """
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"Weight of corpus {name!r} must be zero or more", got=weight)
    if not any(weights.values()):
        raise ConfigError(
            "The weights sum to zero", got=dict(weights), fix="Give one corpus a weight above 0."
        )
    if thousandths := _in_thousandths(weights):
        return thousandths
    shares = {name: _fraction(weight) for name, weight in weights.items()}
    unit = math.lcm(*(share.denominator for share in shares.values()))
    whole = _reduced({name: int(share * unit) for name, share in shares.items()})
    total = sum(whole.values())
    if total <= UNITS:
        return whole
    exact = {name: Fraction(share * UNITS, total) for name, share in whole.items()}
    slots = {name: max(math.floor(share), min(1, math.ceil(share))) for name, share in exact.items()}
    missing = UNITS - sum(slots.values())
    if missing > 0:
        for name in sorted(slots, key=lambda name: (slots[name] - exact[name], name))[:missing]:
            slots[name] += 1
    else:  # tiny weights were rounded up: subtract the excess from the largest
        slots[max(slots, key=lambda name: (slots[name], name))] += missing
    return _reduced(slots)


def _fraction(weight: float) -> Fraction:
    """Return a number (Python's or numpy's) as an exact fraction."""
    return Fraction(int(weight)) if weight == int(weight) else Fraction(float(weight))


def _in_thousandths(weights: Mapping[str, float]) -> dict[str, int] | None:
    counts = {name: round(weight * 1000) for name, weight in weights.items()}
    if any(not math.isclose(counts[name], weight * 1000, rel_tol=1e-12) for name, weight in weights.items()):
        return None
    reduced = _reduced(counts)
    return reduced if sum(reduced.values()) <= PATTERN_SLOTS else None


def _reduced(counts: Mapping[str, int]) -> dict[str, int]:
    divisor = math.gcd(*counts.values())
    return {name: count // divisor for name, count in counts.items()}


@lru_cache(maxsize=8)
def tijdeman(slots: tuple[int, ...]) -> Int64:
    """Return a pattern: [sum(slots)] int64 corpus indices, corpus d appearing slots[d] times.

    At slot s, among the corpora with w_d * s - count_d >= 1/(2D-2), take the one with the smallest (count_d +
    1 - 1/(2D-2)) / w_d. Both sides are compared as integers (times 2D-2 and the number of slots), so the
    pattern is the same on every machine. 65,536 slots take about 0.1 s, once; do not write to the cached
    array.


    >>> tijdeman((2, 1)).tolist()
    [0, 1, 0]
    """
    active = [corpus for corpus, count in enumerate(slots) if count]
    total = sum(slots)
    if len(active) == 1:
        return np.full(total, active[0], dtype=np.int64)
    scale = 2 * len(active) - 2
    # A corpus's j-th turn may come from the first slot s with scale*slots[d]*s >= (scale*j + 1)*total,
    # and is due by (scale*(j+1) - 1) / slots[d]: earliest due first among those that may come.
    waiting = [(-(-total // (scale * slots[d])), d, 0) for d in active]
    heapq.heapify(waiting)
    ready: list[tuple[float, int, int]] = []
    pattern = np.empty(total, dtype=np.int64)
    for slot in range(1, total + 1):
        while waiting and waiting[0][0] <= slot:
            _, corpus, turn = heapq.heappop(waiting)
            # Exact below 2**53: turn < 65,536 and scale < 2**17 keep both integers exact, and equal
            # fractions divide to equal floats.
            heapq.heappush(ready, ((scale * (turn + 1) - 1) / slots[corpus], corpus, turn))
        _, corpus, turn = heapq.heappop(ready)
        pattern[slot - 1] = corpus
        if turn + 1 < slots[corpus]:
            release = -(-((scale * (turn + 1) + 1) * total) // (scale * slots[corpus]))
            heapq.heappush(waiting, (release, corpus, turn + 1))
    return pattern


class Pattern:
    """Mixture as a repeating pattern; corpora are numbered in the order of their slots."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        self._pattern = tijdeman(slots)
        self._period = len(self._pattern)
        self._counts = np.array(slots, dtype=np.int64)
        by_corpus = np.argsort(self._pattern, kind="stable")
        first_turn = np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        self._turn = np.empty(self._period, dtype=np.int64)
        self._turn[by_corpus] = np.arange(self._period) - first_turn
        self._slots_of = np.split(by_corpus, np.cumsum(self._counts)[:-1])

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return, for global samples [n], the corpus index and the corpus's own sample index."""
        cycle, slot = np.divmod(samples, self._period)
        corpus = self._pattern[slot]
        return corpus, cycle * self._counts[corpus] + self._turn[slot]

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` global samples come from each corpus."""
        cycles, rest = divmod(samples, self._period)
        inside = np.bincount(self._pattern[:rest], minlength=len(self._counts))
        counts: list[int] = (cycles * self._counts + inside).tolist()
        return counts

    def sample_of(self, corpus: int, turn: int) -> int:
        """Return the global sample that is a corpus's own sample `turn`: the inverse of `locate`."""
        cycle, inside = divmod(turn, int(self._counts[corpus]))
        return cycle * self._period + int(self._slots_of[corpus][inside])


class Tree:
    """Mixture as a tree, for weights of any size; see the module docstring.

    Nodes are numbered in the order of creation, the root last; a child below 0 is the leaf of corpus -1 -
    child.
    """

    def __init__(self, slots: tuple[int, ...]) -> None:
        self._corpora = len(slots)
        heap = [(weight, -1 - corpus) for corpus, weight in enumerate(slots) if weight]
        heapq.heapify(heap)
        self._children: list[tuple[int, int]] = []
        self._shares: list[int] = []
        self._weights: list[int] = []
        self._parents: dict[int, tuple[int, bool]] = {}
        while len(heap) > 1:
            (light, right), (heavy, left) = heapq.heappop(heap), heapq.heappop(heap)
            node, weight = len(self._children), light + heavy
            self._children.append((left, right))
            self._shares.append(((heavy << 65) + weight) // (2 * weight))  # heavy / weight * 2**64, rounded
            self._parents |= {left: (node, True), right: (node, False)}
            self._weights.append(weight)
            heapq.heappush(heap, (weight, node))
        self._root = heap[0][1]
        self._left, self._right = np.array(self._children, dtype=np.int64).reshape(-1, 2).T
        self._share = np.array(self._shares, dtype=np.uint64)

    @property
    def products_per_sample(self) -> float:
        """Mean number of 64-bit products per located sample: the weighted depth of the leaves."""
        return sum(self._weights) / self._weights[-1] if self._weights else 0.0

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return, for global samples [n], the corpus index and the corpus's own sample index."""
        turn, node = samples.astype(np.uint64), np.full(len(samples), self._root, dtype=np.int64)
        inner = np.flatnonzero(node >= 0)
        while len(inner):
            at, number = node[inner], turn[inner]
            share = self._share[at]
            lefts = _scaled(number, share)
            # The left child takes this sample if the fraction, rounded at 1/2, overflows at the next one.
            is_left = number * share + _HALF >= np.uint64(0) - share
            turn[inner] = np.where(is_left, lefts, number - lefts)
            node[inner] = at = np.where(is_left, self._left[at], self._right[at])
            inner = inner[at >= 0]
        return -1 - node, turn.astype(np.int64)

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` global samples come from each corpus."""
        counts, at = [0] * self._corpora, [(self._root, samples)]
        while at:
            node, number = at.pop()
            if node < 0:
                counts[-1 - node] = number
            else:
                lefts = (number * self._shares[node] + 2**63) >> 64
                at += zip(self._children[node], (lefts, number - lefts), strict=True)
        return counts

    def sample_of(self, corpus: int, turn: int) -> int:
        """Return the global sample that is a corpus's own sample `turn`: the inverse of `locate`."""
        node = -1 - corpus
        while node != self._root:
            node, is_left = self._parents[node]
            share = self._shares[node]
            if is_left:  # the first n with floor(n * share + 1/2) > turn, less one
                turn = -(-(((turn + 1) << 64) - 2**63) // share) - 1
            else:  # the first n with n - floor(n * share + 1/2) > turn, less one
                turn = ((turn << 64) + 2**63) // (2**64 - share)
        return turn


Mixture = Pattern | Tree


def mixture_of(slots: Mapping[str, int]) -> Mixture:
    """Return the mixture of integer weights; the order of the mapping determines the layout."""
    counts = tuple(slots.values())
    return Pattern(counts) if sum(counts) <= _LONGEST_PATTERN else Tree(counts)


_32, _LOW, _HALF = np.uint64(32), np.uint64(2**32 - 1), np.uint64(2**63)


def _scaled(number: UInt64, share: UInt64) -> UInt64:
    """Return floor(number * share / 2**64 + 1/2) [n], for numbers below 2**63."""
    high, low = number >> _32, number & _LOW
    share_high, share_low = share >> _32, share & _LOW
    first, second = high * share_low, low * share_high
    middle = (low * share_low >> _32) + (first & _LOW) + (second & _LOW)
    half = (middle >> np.uint64(31)) & np.uint64(1)  # rounding bit of the fraction
    scaled: UInt64 = high * share_high + (first >> _32) + (second >> _32) + (middle >> _32) + half
    return scaled


def slots_from(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, int]:
    """Convert a weight for every corpus into slots of the mixture, in the order of `names`.

    Raises:
        ConfigError: a weight is missing, invalid or for an unknown corpus.
    """
    for name in check_table("weights", weights, example="{'web': 0.7, 'code': 0.3}"):
        if name not in names:
            raise ConfigError("weights names an unknown corpus", got=name, fix=nearest(name, list(names)))
    for name in names:
        if name not in weights:
            raise ConfigError(f"Corpus {name!r} has no weight", fix="Give it a weight; 0: it is not read.")
        number(f"Weight of corpus {name!r}", weights[name])
    return slots_of({name: weights[name] for name in names})

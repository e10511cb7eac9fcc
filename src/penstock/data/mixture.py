"""Global sample index -> (corpus, its own sample index), in O(1), within one sample of exact shares.

A pattern of 65,536 slots says which corpus each sample comes from and repeats for ever. It is laid
out by Tijdeman's rule (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32,
1980), so every prefix of the run holds each corpus's exact share to within one sample.
"""

import heapq
import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from penstock.core.errors import ConfigError
from penstock.data.types import Int64

PATTERN_SLOTS = 65_536


def slots_of(weights: Mapping[str, float]) -> dict[str, int]:
    """Turn weights into slots of the pattern: largest remainder, at least one for a weight above zero.

    The slots are reduced by their common divisor, so equal mixtures have equal slots. Weights of at most
    three decimals are met exactly: shares that sum to one by a pattern of a thousand slots or fewer, which
    is laid out in a millisecond.

    Raises:
        ConfigError: a weight is negative or not a number, or all are zero.

    >>> slots_of({"web": 3, "code": 1})
    {'web': 3, 'code': 1}
    """
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"Weight of corpus {name!r} must be zero or more", got=weight)
    total = math.fsum(weights.values())
    if not total:
        raise ConfigError(
            "The weights sum to zero", got=dict(weights), fix="Give one corpus a weight above 0."
        )
    if thousandths := _in_thousandths(weights):
        return thousandths
    exact = {name: weight / total * PATTERN_SLOTS for name, weight in weights.items()}
    slots = {name: max(math.floor(share), min(1, math.ceil(share))) for name, share in exact.items()}
    missing = PATTERN_SLOTS - sum(slots.values())
    by_remainder = sorted(slots, key=lambda name: (slots[name] - exact[name], name))
    if missing > 0:
        for name in by_remainder[:missing]:
            slots[name] += 1
    for _ in range(-missing):  # many tiny weights were rounded up: the largest pays
        slots[max(slots, key=lambda name: (slots[name], name))] -= 1
    divisor = math.gcd(*slots.values())
    return {name: count // divisor for name, count in slots.items()}


def _in_thousandths(weights: Mapping[str, float]) -> dict[str, int] | None:
    counts = {name: round(weight * 1000) for name, weight in weights.items()}
    if any(not math.isclose(counts[name], weight * 1000, rel_tol=1e-12) for name, weight in weights.items()):
        return None
    divisor = math.gcd(*counts.values())
    reduced = {name: count // divisor for name, count in counts.items()}
    return reduced if sum(reduced.values()) <= PATTERN_SLOTS else None


@lru_cache(maxsize=8)
def tijdeman(slots: tuple[int, ...]) -> Int64:
    """Lay out a pattern: [sum(slots)] int64 corpus indices, corpus d appearing slots[d] times.

    At slot s, among the corpora with w_d * s - count_d >= 1/(2D-2), the one with the smallest
    (count_d + 1 - 1/(2D-2)) / w_d. Both sides are compared as integers (times 2D-2 and the number of
    slots), so the pattern is the same on every machine. 65,536 slots take about 0.1 s, once; the cached
    array must not be written to.

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


class Mixture:
    """A fixed mixture of corpora, numbered in the order of `slots`, from its own sample 0 on."""

    def __init__(self, slots: Mapping[str, int]) -> None:
        self.slots = dict(slots)
        self._pattern = tijdeman(tuple(slots.values()))
        self._period = len(self._pattern)
        self._counts = np.array(list(slots.values()), dtype=np.int64)
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
        """Return how many of the first global samples came from each corpus."""
        cycles, rest = divmod(samples, self._period)
        inside = np.bincount(self._pattern[:rest], minlength=len(self._counts))
        counts: list[int] = (cycles * self._counts + inside).tolist()
        return counts

    def sample_of(self, corpus: int, turn: int) -> int:
        """Return the global sample that is a corpus's own sample `turn`: the inverse of `locate`."""
        cycle, inside = divmod(turn, int(self._counts[corpus]))
        return cycle * self._period + int(self._slots_of[corpus][inside])

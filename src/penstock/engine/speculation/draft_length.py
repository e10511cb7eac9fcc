"""Draft length: number of draft tokens that pays off, from measured acceptance and times; no torch.

A draft costs the time to make it and one more position in the next step; it pays if it is accepted. The j-th
draft of a sequence is accepted with probability p^j, where p is the sequence's recent acceptance rate. A
draft pays while

    p^j  >  (seconds per position of a step + seconds per draft) * accepted tokens per second.

The right side is small where a step reads all weights for a few tokens, and near or above 1 where many
sequences use the whole processor: drafting stops by itself as the batch grows. Seconds per position come from
a line fitted through recent steps, with and without drafts. A step with drafts may also have a fixed extra
cost, so all drafts of a step together must gain more than they cost, where steps of both sizes were measured.
Steps with prompts are not measured, and disturbance by other work is filtered out. Drafts never change an
answer, only its speed.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from penstock.engine.scheduling.sequence import Sequence

_FORGET = 0.98
"""Decay of a measurement per later one: about the last fifty steps count."""
_GONE = 0.01
"""Weight below which a measurement is dropped."""
_PRIOR = 4.0
"""Weight of the global acceptance rate as a prior for a new sequence, in drafts."""
_PROBE_EVERY, _PROBE_AT, _RETRY_AT = 40, (2, 3), (22, 23)
"""Probing: two of every 40 steps do the opposite, no drafts where there were some, one each where there were
none. They measure the cost of drafts and whether acceptance has changed; two, because one may be disturbed.
Where only some sequences draft, two more steps request one draft from the others."""
_PROBES = 8
"""Maximum sequences that draft in a probing step."""
_WARM_UP = 3
"""Steps that are not measured: first calls allocate and compile."""
_RISE = 1.1
"""Maximum growth of a time estimate per measurement; a faster step counts at once, because other work on a
machine only adds time."""


class AcceptanceRate:
    """Recent share of drafts accepted, among those whose predecessors were accepted."""

    def __init__(self) -> None:
        self._tried = 0.0
        self._stood = 0.0

    def add(self, num_drafts: int, num_kept: int) -> None:
        """Count the drafts of one step; those after the first rejected one do not count as tried."""
        self._tried = self._tried * _FORGET + min(num_drafts, num_kept + 1)
        self._stood = self._stood * _FORGET + num_kept

    def rate(self, prior: float) -> float:
        """Return the acceptance rate, shrunk towards a prior while there are few measurements."""
        return (self._stood + _PRIOR * prior) / (self._tried + _PRIOR)


class DraftLength:
    """Decides the number of drafts of each sequence in each step.

    Args:
        most: maximum drafts of a sequence per step.
        adapt: False: always the maximum.
    """

    def __init__(self, *, most: int, adapt: bool = True) -> None:
        self._most = most
        self._adapt = adapt
        self._all = AcceptanceRate()
        self._each: dict[int, AcceptanceRate] = {}
        self._model, self._drafting = _Times(), _Times()
        self._kept = self._seconds = 0.0
        self._num_steps = 0

    def wanted(self, sequences: Many[Sequence]) -> list[int]:
        """Return the number of drafts for each sequence; called once per step."""
        self._num_steps += 1
        dearness = self._dearness()
        found: list[int] = []
        stand = 0.0
        for sequence in sequences:
            num, standing = self._paying(sequence, dearness) if self._adapt else (self._most, 0.0)
            stand += standing
            found.append(num)
        if self._adapt and not self._pays(found, stand):
            found = [0] * len(found)
        if self._adapt:
            found = self._probed(found)
        return [min(num, _room(sequence)) for num, sequence in zip(found, sequences, strict=True)]

    def record_step(
        self, model_s: float, *, num_tokens: int, num_kept: int, drafting_s: float = 0.0, num_drafts: int = 0
    ) -> None:
        """Record the time of a step without prompts, after `wanted` of that step.

        Args:
            model_s: seconds of the forward pass and sampling, over `num_tokens` positions.
            num_kept: tokens added to answers.
            drafting_s: seconds to make `num_drafts` drafts afterwards.
        """
        if self._num_steps <= _WARM_UP:
            return
        seconds = self._model.add(num_tokens, model_s)
        if num_drafts:
            seconds += self._drafting.add(num_drafts, drafting_s)
        self._seconds = self._seconds * _FORGET + seconds
        self._kept = self._kept * _FORGET + num_kept

    def record(self, sequence: Sequence, *, num_drafts: int, num_kept: int) -> None:
        """Record a sequence's drafts and how many were accepted."""
        self._all.add(num_drafts, num_kept)
        self._each.setdefault(sequence.id, AcceptanceRate()).add(num_drafts, num_kept)

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._each.pop(sequence.id, None)

    def _paying(self, sequence: Sequence, dearness: float) -> tuple[int, float]:
        """Return the number of drafts worth their cost, and how many of them will be accepted on average."""
        known, prior = self._each.get(sequence.id), self._all.rate(0.5)
        rate = prior if known is None else known.rate(prior)
        num, chance, stand = 0, rate, 0.0
        while num < self._most and chance > dearness:
            num, stand, chance = num + 1, stand + chance, chance * rate
        return num, stand

    def _probed(self, nums: list[int]) -> list[int]:
        """Return the numbers of drafts, changed if this is a probing step."""
        turn, some = self._num_steps % _PROBE_EVERY, any(nums)
        if turn in _PROBE_AT and some:
            return [0] * len(nums)
        if turn in (_RETRY_AT if some else _PROBE_AT):
            return [num or int(i < _PROBES) for i, num in enumerate(nums)]
        return nums

    def _pays(self, nums: Many[int], stand: float) -> bool:
        """Return True if these drafts increase tokens per second, or if that is unknown."""
        size, num_drafts = len(nums), sum(nums)
        plain_s, with_s = self._model.of(size), self._model.of(size + num_drafts)
        if not num_drafts or plain_s is None or with_s is None:
            return True
        return (size + stand) * plain_s > size * (with_s + num_drafts * self._drafting.each())

    def _dearness(self) -> float:
        """Return the cost of a draft, in tokens that its time would yield without it."""
        tokens_per_s = self._kept / self._seconds if self._seconds else 0.0
        return (self._model.slope() + self._drafting.each()) * tokens_per_s


def _room(sequence: Sequence) -> int:
    """Return how many drafts could be accepted: a step adds one more token, within max_tokens."""
    return max(0, sequence.request.max_tokens - sequence.num_sampled - 1)


@dataclass(slots=True)
class _Measured:
    """Time of one size of work."""

    weight: float
    """Number of measurements, with decay."""
    seconds: float
    times: int


class _Times:
    """Recent times of work by size, without outliers; an estimate needs two measurements."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Measured] = {}

    def add(self, size: int, seconds: float) -> float:
        """Record a measurement; return the present estimate."""
        size = _rounded(size)
        for other in self._sizes.values():
            other.weight *= _FORGET
        one = self._sizes.setdefault(size, _Measured(0.0, seconds, 0))
        one.weight += 1
        one.times += 1
        one.seconds = min(seconds, _RISE * one.seconds)
        self._sizes = {each: known for each, known in self._sizes.items() if known.weight > _GONE}
        return one.seconds

    def of(self, size: int) -> float | None:
        """Return the seconds of work of about this size; None: not measured."""
        one = self._sizes.get(_rounded(size))
        return one.seconds if one is not None and one.times > 1 else None

    def each(self) -> float:
        """Return seconds per unit of size; 0 before any measurement."""
        units = sum(weight * size for weight, size, _ in self._points())
        return sum(weight * seconds for weight, _, seconds in self._points()) / units if units else 0.0

    def slope(self) -> float:
        """Return the additional seconds per unit, by linear regression; 0 if unknown.

        Measurements scatter: the result is kept between 0 and seconds per unit.
        """
        points = self._points()
        if len(points) < 2:
            return 0.0
        total = sum(weight for weight, _, _ in points)
        mean_size = sum(weight * size for weight, size, _ in points) / total
        mean_s = sum(weight * seconds for weight, _, seconds in points) / total
        spread = sum(weight * (size - mean_size) ** 2 for weight, size, _ in points)
        rise = sum(weight * (size - mean_size) * (seconds - mean_s) for weight, size, seconds in points)
        return min(max(0.0, rise / spread), self.each())

    def _points(self) -> list[tuple[float, int, float]]:
        return [(one.weight, size, one.seconds) for size, one in self._sizes.items() if one.times > 1]


def _rounded(size: int) -> int:
    """Return a size rounded down to three binary digits, so that sizes repeat.

    >>> [_rounded(size) for size in (5, 8, 9, 100)]
    [5, 8, 8, 96]
    """
    shift = max(0, size.bit_length() - 3)
    return size >> shift << shift

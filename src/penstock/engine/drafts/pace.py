"""How many tokens to guess: as many as are expected to pay, from what was measured; no torch.

A draft costs its own making and one more position in the next step, and pays if it stands. The j-th
draft of a sequence stands with p^j, where p is the share of its drafts that stood lately, so it is worth
guessing while

    p^j  >  (seconds a position adds to a step + seconds a draft takes) * tokens kept per second.

The right side is small where a step reads all weights for a few tokens and near or above 1 where
many sequences fill the processor: drafts end by themselves as the batch grows. Seconds per position
come from a line through the steps measured lately, which needs steps with and without drafts. A step with
drafts may also be slower by whatever number there are: so all drafts of a step have to bring more than they
cost together, where the seconds of steps of both sizes are known. Steps that compute prompts are not
measured, and what other work adds to a step is filtered. Nothing here changes an answer, only when it comes.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from penstock.engine.scheduling.sequence import Sequence

_FORGET = 0.98
"""Weight of a measurement after one more: the last fifty steps count."""
_GONE = 0.01
"""Weight below which a measurement is forgotten."""
_PRIOR = 4.0
"""A new sequence's share of drafts that stand is that of all, until it has made about so many."""
_PROBE_EVERY, _PROBE_AT, _RETRY_AT = 40, (2, 3), (22, 23)
"""Two of so many steps do the opposite: no drafts where there were some, one each where there were none. They
show what drafts cost, and whether they have come to stand; two, since one may have been disturbed. Where only
some sequences make drafts, two more steps ask the others for one."""
_PROBES = 8
"""Sequences that make a draft in such a step, at most."""
_WARM_UP = 3
"""Steps that are not measured: first calls allocate, and compile."""
_RISE = 1.1
"""A measured time grows by this at most, however slow a step was; when one was faster, it is that at once:
other work on a machine only ever adds."""


class Acceptance:
    """The share of drafts that stood, of those whose turn came, lately."""

    def __init__(self) -> None:
        self._tried = 0.0
        self._stood = 0.0

    def add(self, num_drafts: int, num_kept: int) -> None:
        """Count a run of drafts; those behind the first that fell were not tried."""
        self._tried = self._tried * _FORGET + min(num_drafts, num_kept + 1)
        self._stood = self._stood * _FORGET + num_kept

    def rate(self, prior: float) -> float:
        """Return the share, drawn towards a prior while little is known."""
        return (self._stood + _PRIOR * prior) / (self._tried + _PRIOR)


class Pace:
    """Decides the number of drafts of each sequence in each step.

    Args:
        most: drafts of a sequence in one step.
        adapt: False: always as many as that.
    """

    def __init__(self, *, most: int, adapt: bool = True) -> None:
        self._most = most
        self._adapt = adapt
        self._all = Acceptance()
        self._each: dict[int, Acceptance] = {}
        self._model, self._drafting = _Times(), _Times()
        self._kept = self._seconds = 0.0
        self._num_steps = 0

    def wanted(self, sequences: Many[Sequence]) -> list[int]:
        """Return how many tokens to guess for each sequence; called once a step."""
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

    def step_took(
        self, model_s: float, *, num_tokens: int, num_kept: int, drafting_s: float = 0.0, num_drafts: int = 0
    ) -> None:
        """Count a step that computed no prompt, after `wanted` of that step.

        Args:
            model_s: seconds of the model, over `num_tokens` positions.
            num_kept: tokens that it added to answers.
            drafting_s: seconds of making `num_drafts` drafts after it.
        """
        if self._num_steps <= _WARM_UP:
            return
        seconds = self._model.add(num_tokens, model_s)
        if num_drafts:
            seconds += self._drafting.add(num_drafts, drafting_s)
        self._seconds = self._seconds * _FORGET + seconds
        self._kept = self._kept * _FORGET + num_kept

    def stood(self, sequence: Sequence, *, num_drafts: int, num_kept: int) -> None:
        """Count a sequence's drafts, and how many of them stood."""
        self._all.add(num_drafts, num_kept)
        self._each.setdefault(sequence.id, Acceptance()).add(num_drafts, num_kept)

    def forget(self, sequence: Sequence) -> None:
        """Let go of a sequence that ended."""
        self._each.pop(sequence.id, None)

    def _paying(self, sequence: Sequence, dearness: float) -> tuple[int, float]:
        """Return how many drafts are each worth their cost, and how many of them are expected to stand."""
        known, prior = self._each.get(sequence.id), self._all.rate(0.5)
        rate = prior if known is None else known.rate(prior)
        num, chance, stand = 0, rate, 0.0
        while num < self._most and chance > dearness:
            num, stand, chance = num + 1, stand + chance, chance * rate
        return num, stand

    def _probed(self, nums: list[int]) -> list[int]:
        """Return what a step does instead, where it is one of those that find out."""
        turn, some = self._num_steps % _PROBE_EVERY, any(nums)
        if turn in _PROBE_AT and some:
            return [0] * len(nums)
        if turn in (_RETRY_AT if some else _PROBE_AT):
            return [num or int(i < _PROBES) for i, num in enumerate(nums)]
        return nums

    def _pays(self, nums: Many[int], stand: float) -> bool:
        """Say whether a step with these drafts brings more tokens a second than a plain one, if known."""
        size, num_drafts = len(nums), sum(nums)
        plain_s, with_s = self._model.of(size), self._model.of(size + num_drafts)
        if not num_drafts or plain_s is None or with_s is None:
            return True
        return (size + stand) * plain_s > size * (with_s + num_drafts * self._drafting.each())

    def _dearness(self) -> float:
        """Return what a draft costs, in tokens that its time would bring otherwise."""
        tokens_per_s = self._kept / self._seconds if self._seconds else 0.0
        return (self._model.slope() + self._drafting.each()) * tokens_per_s


def _room(sequence: Sequence) -> int:
    """Return how many drafts could stand: a step draws one token more, and there the answer may end."""
    return max(0, sequence.request.max_tokens - sequence.num_drawn - 1)


@dataclass(slots=True)
class _Measured:
    """One size of work."""

    weight: float
    """Measurements, each worth less with every later one of any size."""
    seconds: float
    times: int


class _Times:
    """How long work of each size took lately, without what disturbed it; known once it was seen twice."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Measured] = {}

    def add(self, size: int, seconds: float) -> float:
        """Count a measurement; return what is believed now."""
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
        """Return the seconds of work of about this size, if they are known."""
        one = self._sizes.get(_rounded(size))
        return one.seconds if one is not None and one.times > 1 else None

    def each(self) -> float:
        """Return seconds per unit of size; 0 before anything is known."""
        units = sum(weight * size for weight, size, _ in self._points())
        return sum(weight * seconds for weight, _, seconds in self._points()) / units if units else 0.0

    def slope(self) -> float:
        """Return what one more unit adds to a time: from 0, if that is not known, to seconds per unit.

        Measured times scatter: a line that falls or that starts below nothing is not believed.
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
    """Return a size to three binary digits, so that sizes come again.

    >>> [_rounded(size) for size in (5, 8, 9, 100)]
    [5, 8, 8, 96]
    """
    shift = max(0, size.bit_length() - 3)
    return size >> shift << shift

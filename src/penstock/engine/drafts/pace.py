"""How many tokens to guess: as many as are expected to pay, from what was measured; no torch.

A draft costs its own making and one more position in the next step, and pays if it stands. The j-th
draft of a sequence stands with p^j, where p is the share of its drafts that stood lately, so it is worth
guessing while

    p^j  >  (seconds a position adds to a step + seconds a draft takes) * tokens kept per second.

The right side is small where a step reads all weights for a few tokens and near or above 1 where
many sequences fill the processor: drafts end by themselves as the batch grows. Seconds per position
come from a line through the steps measured lately, which needs steps with and without drafts. Nothing here
changes an answer, only when it comes.
"""

from collections.abc import Iterable

from penstock.engine.sequence import Sequence

_FORGET = 0.98
"""Weight of a measurement after one more: the last fifty steps count."""
_PRIOR = 4.0
"""A new sequence's share of drafts that stand is that of all, until it has made about so many."""
_PROBE_EVERY = 24
"""Steps after which one does the opposite: no drafts where there were some, one where there were none. It
shows what drafts cost, and whether they have come to stand."""
_PROBES = 8
"""Sequences that make a draft in such a step, at most."""


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
        self._steps = _Line()
        self._rate = _Line()  # of this one and the next only the means are used
        self._draft_s = _Line()
        self._num_steps = 0

    def wanted(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return how many tokens to guess for each sequence; called once a step."""
        self._num_steps += 1
        dearness, probes = self._dearness(), self._num_steps % _PROBE_EVERY == 2
        found: list[int] = []
        for sequence in sequences:
            num = self._paying(sequence, dearness) if self._adapt else self._most
            if probes and self._adapt:
                num = 0 if num else int(len(found) < _PROBES)
            found.append(min(num, _room(sequence)))
        return found

    def step_took(
        self, model_s: float, *, num_tokens: int, num_kept: int, drafting_s: float = 0.0, num_drafts: int = 0
    ) -> None:
        """Count a step.

        Args:
            model_s: seconds of the model, over `num_tokens` positions.
            num_kept: tokens that it added to answers.
            drafting_s: seconds of making `num_drafts` drafts after it.
        """
        self._steps.add(num_tokens, model_s)
        self._rate.add(model_s + drafting_s, num_kept)
        if num_drafts:
            self._draft_s.add(num_drafts, drafting_s)

    def stood(self, sequence: Sequence, *, num_drafts: int, num_kept: int) -> None:
        """Count a sequence's drafts, and how many of them stood."""
        self._all.add(num_drafts, num_kept)
        self._each.setdefault(sequence.id, Acceptance()).add(num_drafts, num_kept)

    def forget(self, sequence: Sequence) -> None:
        """Let go of a sequence that ended."""
        self._each.pop(sequence.id, None)

    def _paying(self, sequence: Sequence, dearness: float) -> int:
        known, prior = self._each.get(sequence.id), self._all.rate(0.5)
        rate = prior if known is None else known.rate(prior)
        num, chance = 0, rate
        while num < self._most and chance > dearness:
            num, chance = num + 1, chance * rate
        return num

    def _dearness(self) -> float:
        """Return what a draft costs, in tokens that its time would bring otherwise."""
        return (self._steps.slope() + self._draft_s.ratio()) * self._rate.ratio()


def _room(sequence: Sequence) -> int:
    """Return how many drafts could stand: a step draws one token more, and there the answer may end."""
    return max(0, sequence.request.max_tokens - sequence.num_drawn - 1)


class _Line:
    """A line through the points seen lately."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Count a point."""
        self._n, self._x, self._y, self._xx, self._xy = (
            total * _FORGET + new
            for total, new in zip(
                (self._n, self._x, self._y, self._xx, self._xy), (1.0, x, y, x * x, x * y), strict=True
            )
        )

    def ratio(self) -> float:
        """Return y per x; 0 before there is any."""
        return self._y / self._x if self._x else 0.0

    def slope(self) -> float:
        """Return what one more x adds to y: from 0, if that is not known, to y per x.

        Measured times scatter: a line that falls or that starts below nothing is not believed.
        """
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-9 * self._xx * self._n:
            return 0.0
        return min(max(0.0, (self._n * self._xy - self._x * self._y) / spread), self.ratio())

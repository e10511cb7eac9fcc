"""The tokens of one step, handed out to sequences: who gets how many of what is left."""

from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Share


class StepBudget:
    """What is left of a step, and how many positions each sequence got.

    Args:
        budget: positions of the step.
        piece: a prompt that wants more than this, and more than the step, does not get all of it; and
            positions of prompts whose every token is to be scored.
    """

    def __init__(self, budget: int, *, piece: int) -> None:
        self.left = budget
        self._long = max(budget, piece)
        self._left_to_score = piece
        self.runs: dict[Sequence, int] = {}

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence so many positions more."""
        if num_tokens > 0:
            self.runs[sequence] = self.runs.get(sequence, 0) + num_tokens
            self._count(sequence, num_tokens)

    def take_back(self, sequence: Sequence) -> None:
        """Take all that a sequence got."""
        self._count(sequence, -self.runs.pop(sequence, 0))

    def room(self, sequence: Sequence) -> int:
        """Return how many positions a sequence could get: rows of logits for all of them are large."""
        return min(self.left, self._left_to_score) if sequence.is_scored else self.left

    def give_chunk(self, sequence: Sequence, *, is_last: bool) -> None:
        """Give a prompt positions: half of what is left if it is long and others wait."""
        wanted = len(sequence.tokens) - sequence.num_computed
        room = self.room(sequence)
        most = room if is_last or wanted <= self._long else (room + 1) // 2
        self.give(sequence, min(wanted, most))

    def top_up(self) -> None:
        """Give what nobody else could use to the prompts that want more."""
        for sequence, given in self.runs.items() if self.left else ():
            wanted = len(sequence.tokens) - sequence.num_computed - given
            self.give(sequence, min(wanted, self.room(sequence)))

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        self.left -= num_tokens
        if sequence.is_scored:
            self._left_to_score -= num_tokens

    def shares(self) -> tuple[Share, ...]:
        """The shares, single tokens first."""
        items = sorted(self.runs.items(), key=lambda item: item[1] > 1)
        return tuple(_share(sequence, num_tokens) for sequence, num_tokens in items)


def _share(sequence: Sequence, num_tokens: int) -> Share:
    num_drafts = max(0, sequence.num_computed + num_tokens - len(sequence.tokens))
    return Share(
        sequence=sequence,
        start=sequence.num_computed,
        num_tokens=num_tokens,
        drafts=sequence.drafts[:num_drafts],
    )

"""How often drafts of the heads stand: on text that was not trained on, and in what the model writes."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from penstock.models.speculator import Speculator
from penstock.train.speculator.loss import Lesson, hits


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What was counted."""

    on_text: tuple[float, ...]
    """Per head: the share of positions of text at which it was right, of those where all before it were."""
    decoding: tuple[float, ...]
    """Per head: the share of its drafts that stood, of those whose turn came, in greedy decoding."""
    tokens_per_step: float
    """Tokens that one step of the model adds to an answer, in greedy decoding with a draft of every head."""
    steps: int
    """Of decoding, that this was counted over."""


def measure(speculator: Speculator, *, text: Iterable[Lesson], own: Iterable[Lesson]) -> Acceptance:
    """Measure heads.

    Args:
        text: rows of text.
        own: what the model wrote, always the likeliest token: decoding with drafts would write the same.
    """
    num_heads = speculator.config.n_predict
    right, walked = Counts(num_heads), Counts(num_heads)
    for lesson in text:
        right.add(hits(speculator, lesson))
    steps = tokens = 0
    for lesson in own:
        for stood in _walk(speculator, lesson):
            steps, tokens = steps + 1, tokens + 1 + stood
            walked.add([(int(stood > head), int(stood >= head)) for head in range(num_heads)])
    return Acceptance(
        on_text=right.rates(),
        decoding=walked.rates(),
        tokens_per_step=tokens / max(1, steps),
        steps=steps,
    )


class Counts:
    """Right and tried, per head."""

    def __init__(self, num_heads: int) -> None:
        self._sums = torch.zeros(num_heads, 2, dtype=torch.int64)

    def add(self, counted: list[tuple[int, int]]) -> None:
        """Count."""
        self._sums += torch.tensor(counted)

    def rates(self) -> tuple[float, ...]:
        """Return the share that was right; 0 where nothing was tried."""
        return tuple(right / max(1, tried) for right, tried in self._sums.tolist())


@torch.no_grad()
def _walk(speculator: Speculator, lesson: Lesson) -> list[int]:
    """Return how many drafts stood in each step of decoding the rows of a lesson."""
    num_heads, labels = speculator.config.n_predict, lesson.labels
    last = labels.shape[1] - num_heads - 1  # a step further back has a token for every draft
    positions = slice(lesson.first, last)
    guesses = speculator.guesses(
        lesson.hidden[:, positions].flatten(0, 1), labels[:, positions].flatten(), num=num_heads
    )
    # labels[t] follows token t and is known to the step at t; its drafts are for the labels behind it
    came = labels.unfold(1, num_heads, 1)[:, lesson.first + 1 : last + 1].flatten(0, 1)
    stood = (guesses == came).int().cumprod(1).sum(1).view(len(labels), -1).tolist()
    found = []
    for row in stood:
        at = 0
        while at < len(row):
            found.append(row[at])
            at += 1 + row[at]
    return found

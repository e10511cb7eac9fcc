"""Acceptance rate of drafts: on held-out text, and in generated text."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from penstock.models.speculator import Speculator
from penstock.train.speculator.batches import Lesson, hits


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceReport:
    """Measured acceptance of draft heads."""

    on_text: tuple[float, ...]
    """Per head: share of correct predictions on text, where all heads before it were correct."""
    decoding: tuple[float, ...]
    """Per head: share of its drafts that were accepted in greedy decoding, where all before it were."""
    tokens_per_step: float
    """Mean tokens added per decoding step, in greedy decoding with a draft of every head."""
    steps: int
    """Number of decoding steps measured."""


def measure(speculator: Speculator, *, text: Iterable[Lesson], own: Iterable[Lesson]) -> AcceptanceReport:
    """Measure the acceptance of heads.

    Args:
        text: rows of text.
        own: greedy continuations by the model: decoding with drafts would generate the same.
    """
    num_heads = speculator.config.n_predict
    right, walked = AcceptanceCounts(num_heads), AcceptanceCounts(num_heads)
    for lesson in text:
        right.add(hits(speculator, lesson))
    steps = tokens = 0
    for lesson in own:
        for stood in _walk(speculator, lesson):
            steps, tokens = steps + 1, tokens + 1 + stood
            walked.add([(int(stood > head), int(stood >= head)) for head in range(num_heads)])
    return AcceptanceReport(
        on_text=right.rates(),
        decoding=walked.rates(),
        tokens_per_step=tokens / max(1, steps),
        steps=steps,
    )


class AcceptanceCounts:
    """Counts of correct and tried drafts, per head."""

    def __init__(self, num_heads: int) -> None:
        self._sums = torch.zeros(num_heads, 2, dtype=torch.int64)

    def add(self, counted: list[tuple[int, int]]) -> None:
        """Add (correct, tried) per head."""
        self._sums += torch.tensor(counted)

    def rates(self) -> tuple[float, ...]:
        """Return the share of correct drafts; 0 where none was tried."""
        return tuple(right / max(1, tried) for right, tried in self._sums.tolist())


@torch.no_grad()
def _walk(speculator: Speculator, lesson: Lesson) -> list[int]:
    """Return the number of accepted drafts of each decoding step over the rows of a batch."""
    num_heads, labels = speculator.config.n_predict, lesson.labels
    last = labels.shape[1] - num_heads - 1  # up to here every draft has a token to compare with
    positions = slice(lesson.first, last)
    guesses = speculator.guesses(
        lesson.hidden[:, positions].flatten(0, 1), labels[:, positions].flatten(), num=num_heads
    )
    # labels[t] follows token t and is known to the step at t; its drafts are for the labels after it
    came = labels.unfold(1, num_heads, 1)[:, lesson.first + 1 : last + 1].flatten(0, 1)
    stood = (guesses == came).int().cumprod(1).sum(1).view(len(labels), -1).tolist()
    found = []
    for row in stood:
        at = 0
        while at < len(row):
            found.append(row[at])
            at += 1 + row[at]
    return found

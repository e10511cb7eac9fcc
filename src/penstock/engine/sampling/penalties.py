"""Penalties: change logits by tokens already present (repetition, presence, frequency).

The tokens of prompt and answer are counted once and then updated token by token, in arrays. A step changes as
many logits as there are distinct tokens and counts nothing again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from penstock.engine.sampling_params import Sampling


class Tallied(NamedTuple):
    """Distinct tokens and their counts, as arrays of one length."""

    tokens: np.ndarray
    """int64."""
    counts: np.ndarray
    """int64: occurrences in the answer; 0: in the prompt only."""


class TokenCounts:
    """Token counts of an answer, and the set of its prompt's tokens."""

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self._num_prompt = len(distinct)
        self._index = {token: i for i, token in enumerate(distinct.tolist())}
        self._tokens = distinct
        self._counts = np.zeros(len(distinct), dtype=np.int64)

    def add(self, tokens: Iterable[int], *, times: int = 1) -> None:
        """Count tokens of the answer; `times=-1` removes them again."""
        for token in tokens:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.zeros(index + 8, dtype=np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(index + 8, dtype=np.int64)))
            self._tokens[index] = token
            self._counts[index] += times

    def tallied(self) -> Tallied:
        """Return a copy of the present counts."""
        tokens, counts = self._tokens[: len(self._index)], self._counts[: len(self._index)]
        there = (np.arange(len(tokens)) < self._num_prompt) | (counts > 0)
        return Tallied(tokens[there], counts[there])


def needs_tally(sampling: Sampling) -> bool:
    """Return True if any of the three penalties is on."""
    return (
        sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    )


def penalise(scores: Float[Tensor, "rows vocab"], penalised: Sequence[tuple[int, Tallied, Sampling]]) -> None:
    """Apply penalties in place; each triple is a row, its token counts and its settings."""
    sizes = [len(tallied.tokens) for _, tallied, _ in penalised]
    rows = np.repeat([row for row, _, _ in penalised], sizes)
    tokens = np.concatenate([tallied.tokens for _, tallied, _ in penalised])
    counts = np.concatenate([tallied.counts for _, tallied, _ in penalised])
    repetition, presence, frequency = (
        np.repeat([getattr(s, f"{name}_penalty") for *_, s in penalised], sizes)
        for name in ("repetition", "presence", "frequency")
    )
    where = tuple(torch.from_numpy(index).to(scores.device) for index in (rows, tokens))
    factor, less = (
        torch.from_numpy(values).to(scores)
        for values in (repetition, presence * (counts > 0) + frequency * counts)
    )
    found = scores[where]
    scores[where] = torch.where(found > 0, found / factor, found * factor) - less

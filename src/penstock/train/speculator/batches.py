"""Batches for training speculator heads: rows of text or of generated text, with hidden states.

Legend: b rows, l tokens, t positions with a token for every head, n heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from penstock.core.rng import key_of
from penstock.data import Loader
from penstock.data.types import IGNORED_LABEL
from penstock.models.decoder.model import Decoder
from penstock.models.speculator import Speculator
from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import OutputHead
from penstock.train.speculator.config import SpeculatorTraining
from penstock.train.step import check_vocabulary

FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")

Write = Callable[[Sequence[Sequence[int]], Sequence[int] | None], list[list[int]]]
"""(prompts, a seed for each or None for greedy decoding) -> the model's continuation of each, all of one
length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A training batch of rows, and the positions at which heads predict."""

    hidden: Float[Tensor, "b l hidden"]
    """Normalised hidden states of the model, float32, detached."""
    labels: Int[Tensor, "b l"]
    """Next token of each position."""
    documents: Int[Tensor, "b l"]
    """Document index of each token: heads do not predict across documents."""
    first: int = 0
    """First position at which heads predict; earlier ones are context."""

    def per_head(
        self, num_heads: int
    ) -> Iterator[tuple[Int[Tensor, "b t"], Int[Tensor, "b t"], Bool[Tensor, "b t"]]]:
        """Yield per head its input tokens, its target tokens, and a mask of valid positions."""
        last = self.labels.shape[1] - num_heads
        start = self.documents[:, self.first : last]
        for head in range(num_heads):
            given = self.labels[:, self.first + head : last + head]
            wanted = self.labels[:, self.first + head + 1 : last + head + 1]
            same = start == self.documents[:, self.first + head + 1 : last + head + 1]
            yield given, wanted, same & (wanted != IGNORED_LABEL) & (given != IGNORED_LABEL)

    def states(self, speculator: Speculator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield per head its states [b, t, inner], its target tokens, and a mask of valid positions."""
        heads = list(self.per_head(speculator.config.n_predict))
        tokens = torch.stack([given.clamp(min=0) for given, _, _ in heads])
        hidden = self.hidden[:, self.first : self.first + tokens.shape[2]]
        for state, (_, wanted, counts) in zip(speculator.states(hidden, tokens), heads, strict=True):
            yield state, wanted, counts


class Lessons:
    """Builds the batch of each step, as a function of the step's number.

    Args:
        base: the model for which heads are trained; frozen.
        loader: rows with FIELDS.
        write: continues prompts with the same model.
    """

    def __init__(self, base: Decoder, loader: Loader, write: Write, training: SpeculatorTraining) -> None:
        self._base = base
        self._loader = loader
        self._write = write
        self._training = training
        self._device = next(base.parameters()).device

    def of_step(self, step: int) -> Lesson:
        """Return the batch of a step."""
        if self._training.stage_of(step) == "text":
            return self.of_text(step)
        return self.of_own(step, sampled=True)

    @torch.no_grad()
    def of_text(self, step: int) -> Lesson:
        """Return a batch of corpus rows."""
        batch = self._loader.batch_at(step)
        check_vocabulary(batch, self._base.config.vocab_size)
        batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
        hidden = self._base.hidden(
            batch["input_ids"], position_ids=batch["position_ids"], cu_seqlens=batch["cu_seqlens"]
        )
        return Lesson(hidden=hidden.float(), labels=batch["labels"], documents=batch["document_ids"])

    @torch.no_grad()
    def of_own(self, step: int, *, sampled: bool) -> Lesson:
        """Return a batch of rows that begin as in the corpus and continue as the model generates.

        Args:
            sampled: True: sampling at temperature 1; False: greedy decoding.
        """
        batch, length = self._loader.batch_at(step), self._training.prompt_tokens
        check_vocabulary(batch, self._base.config.vocab_size)
        prompts = batch["input_ids"][:, :length].tolist()
        seeds = [key_of(self._training.seed, "own", step, row) >> 1 for row in range(len(prompts))]
        written = self._write(prompts, seeds if sampled else None)
        rows = [prompt + own for prompt, own in zip(prompts, written, strict=True)]
        ids = torch.tensor(rows, device=self._device)
        return Lesson(
            hidden=self._base.hidden(ids).float(),
            labels=_next_tokens(ids),
            documents=torch.zeros_like(ids),
            first=length - 1,  # the next token of this position is the first generated one
        )


def _next_tokens(ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED_LABEL)


def losses(speculator: Speculator, lesson: Lesson) -> Float[Tensor, "n"]:
    """Return each head's mean cross entropy in nats, given the correct tokens before."""
    found = []
    for index, (state, wanted, counts) in enumerate(lesson.states(speculator)):
        labels = wanted.where(counts, IGNORED_LABEL).flatten()
        head = OutputHead(speculator.output(index).weight)
        total, _ = cross_entropy(state.flatten(0, 1), head, labels, ignored=IGNORED_LABEL)
        found.append(total / counts.sum().clamp(min=1))
    return torch.stack(found)


@torch.no_grad()
def hits(speculator: Speculator, lesson: Lesson) -> list[tuple[int, int]]:
    """Return (correct, tried) positions per head; tried where all heads before it were correct."""
    found, reached = [], None
    for index, (state, wanted, counts) in enumerate(lesson.states(speculator)):
        reached = counts if reached is None else reached & counts
        right = reached & (speculator.output(index)(state).argmax(-1) == wanted)
        found.append((int(right.sum()), int(reached.sum())))
        reached = right
    return found

"""The rows of each step: text of a corpus, or what the model writes after the beginnings of such text."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.core.rng import key_of
from penstock.data import Loader
from penstock.data.types import IGNORED_LABEL
from penstock.models.llama.model import Llama
from penstock.train.speculator.config import SpeculatorTraining
from penstock.train.speculator.loss import Lesson
from penstock.train.step import check_vocabulary

FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")

Write = Callable[[Sequence[Sequence[int]], Sequence[int] | None], list[list[int]]]
"""(prompts, a seed for each or None for the likeliest tokens) -> what the model writes after each, all of one
length."""


class Lessons:
    """Makes rows into lessons; every step's is a function of its number.

    Args:
        base: the model that heads are trained for; stays as it is.
        loader: of rows with FIELDS.
        write: continues prompts with the same model.
    """

    def __init__(self, base: Llama, loader: Loader, write: Write, training: SpeculatorTraining) -> None:
        self._base = base
        self._loader = loader
        self._write = write
        self._training = training
        self._device = next(base.parameters()).device

    def of_step(self, step: int) -> Lesson:
        """Return what a step trains on."""
        if self._training.stage_of(step) == "text":
            return self.of_text(step)
        return self.of_own(step, sampled=True)

    @torch.no_grad()
    def of_text(self, step: int) -> Lesson:
        """Return rows of the corpus."""
        batch = self._loader.batch_at(step)
        check_vocabulary(batch, self._base.config.vocab_size)
        batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
        hidden = self._base.hidden(
            batch["input_ids"], position_ids=batch["position_ids"], cu_seqlens=batch["cu_seqlens"]
        )
        return Lesson(hidden=hidden.float(), labels=batch["labels"], documents=batch["document_ids"])

    @torch.no_grad()
    def of_own(self, step: int, *, sampled: bool) -> Lesson:
        """Return what the model writes after the first tokens of rows of the corpus.

        Args:
            sampled: drawn as they are likely; False: always the likeliest token.
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
            first=length - 1,  # whose next token is the first one written
        )


def _next_tokens(ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED_LABEL)

"""Distillation: the mean divergence from a teacher's most likely tokens over the learned tokens.

The teacher's top k are columns beside the corpus, written by `penstock data teach`; the teacher itself takes
no memory in training. On held-out rows the loss is that of the next token, comparable with other runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.data.corpus.columns import TEACHER_IDS, TEACHER_LOG_PROBS
from penstock.data.types import IGNORED_LABEL
from penstock.nn.head import OutputHead
from penstock.nn.top_k_divergence import top_k_divergence
from penstock.obs.sinks import Record
from penstock.parallel.mesh import World
from penstock.train.next_token import CorpusSums, NextToken
from penstock.train.objective import DeviceBatch, Finish
from penstock.train.state import TrainState


@dataclass(frozen=True, slots=True)
class Distillation:
    """Mean divergence from the teacher over the labels."""

    temperature: float
    fields: tuple[str, ...] = (TEACHER_IDS, TEACHER_LOG_PROBS)

    def begin_step(self, state: TrainState, batch: DeviceBatch, world: World, *, rows: int) -> CorpusSums:
        """Return the accumulator of losses by corpus."""
        return NextToken().begin_step(state, batch, world, rows=rows)

    def prepare(self, part: DeviceBatch) -> DeviceBatch:
        """Return the micro-batch as it is."""
        return part

    def count(self, batch: DeviceBatch, columns: slice) -> int:
        """Return the number of labels."""
        return NextToken().count(batch, columns)

    def finish(self, part: DeviceBatch, sums: CorpusSums) -> Finish:
        """Return the summed divergence."""
        labels = part["labels"]
        learned = (labels.flatten() != IGNORED_LABEL).nonzero()[:, 0]
        ids, log_probs = (
            torch.cat(part[name]) if isinstance(part[name], tuple) else part[name] for name in self.fields
        )
        k = 1 if ids.ndim == 2 else ids.shape[2]  # a column of one value per token has no axis for it

        def divergence(hidden: Tensor, head: OutputHead) -> Tensor:
            total, each = top_k_divergence(
                hidden.flatten(0, 1)[learned],
                head,
                ids.flatten(0, 1)[learned].view(len(learned), k),
                log_probs.flatten(0, 1)[learned].view(len(learned), k),
                temperature=self.temperature,
            )
            if sums.losses is not None:
                by_row = each.new_zeros(labels.numel(), dtype=torch.float64).index_copy(
                    0, learned, each.double()
                )
                sums.losses.add(by_row.view_as(labels).sum(1))
            return total

        return divergence

    def metrics(self, sums: Sequence[float]) -> Record:  # noqa: ARG002
        """Return no metrics besides those of every step."""
        return {}

    def validate(self, state: TrainState, world: World, *, rows: int) -> Record:
        """Return the next-token loss on the held-out rows."""
        return NextToken().validate(state, world, rows=rows)

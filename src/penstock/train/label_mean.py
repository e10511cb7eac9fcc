"""Mean of a loss over labels: the objective of every run, except those with a preference loss.

The loss of a label is the cross entropy of the next token, or in distillation the divergence from a teacher.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.data.types import IGNORED_LABEL
from penstock.obs.sinks import Record
from penstock.parallel.mesh import World
from penstock.train.evaluate import heldout_scores
from penstock.train.loss import CorpusLosses, next_token_loss
from penstock.train.objective import DeviceBatch, Finish
from penstock.train.score import validation_record
from penstock.train.state import TrainState


@dataclass(slots=True)
class CorpusSums:
    """Losses and labels by corpus of this rank's share of a step."""

    losses: CorpusLosses | None
    """None: the mixture is not adaptive."""
    labels: Tensor | None = None
    """[corpora] number of labels of each corpus."""

    def values(self) -> Sequence[Tensor]:
        """Return the loss sums by corpus, then the label counts by corpus: [corpora] float64 each."""
        return [] if self.losses is None or self.labels is None else [self.losses.sums, self.labels]


TokenLoss = Callable[[DeviceBatch, CorpusLosses | None], Finish]
"""(micro-batch, accumulator of losses by corpus) -> the function that computes the summed loss."""


def next_token(part: DeviceBatch, losses: CorpusLosses | None) -> Finish:
    """Return the summed cross entropy of the labels."""
    return next_token_loss(part["labels"], None if losses is None else losses.add)


@dataclass(frozen=True, slots=True)
class LabelMean:
    """Mean of a loss over the labels. On held-out rows it is that of the next token, whatever the loss."""

    loss: TokenLoss = next_token
    fields: tuple[str, ...] = ()

    def begin_step(self, state: TrainState, batch: DeviceBatch, world: World, *, rows: int) -> CorpusSums:  # noqa: ARG002
        """Return the accumulator of losses by corpus."""
        if state.adaptive is None:
            return CorpusSums(None)
        of_rows = state.loader.corpora_of(batch["sample_ids"].cpu().numpy())
        losses = CorpusLosses(len(state.loader.corpora), torch.from_numpy(of_rows).to(world.device))
        columns = state.mesh.sequence_slice(batch["labels"].shape[1]) if state.mesh.has_loss else slice(0)
        counts = (batch["labels"][:, columns] != IGNORED_LABEL).sum(1)
        return CorpusSums(losses, losses.labels(counts.to(world.device)))

    def prepare(self, part: DeviceBatch) -> DeviceBatch:
        """Return the micro-batch as it is."""
        return part

    def count(self, batch: DeviceBatch, columns: slice) -> int:
        """Return the number of labels."""
        return int((batch["labels"][:, columns] != IGNORED_LABEL).sum())

    def finish(self, part: DeviceBatch, sums: CorpusSums) -> Finish:
        """Return the summed loss of the labels."""
        return self.loss(part, sums.losses)

    def metrics(self, sums: Sequence[float]) -> Record:  # noqa: ARG002
        """Return no metrics besides those of every step."""
        return {}

    def validate(self, state: TrainState, world: World, *, rows: int) -> Record:
        """Return the loss on the held-out rows."""
        assert state.heldout is not None
        scores = heldout_scores(state.model, state.heldout, world, state.mesh, rows=rows)
        return validation_record(scores, step=state.step)

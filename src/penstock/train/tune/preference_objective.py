"""Objective of the preference losses: its steps, and a validation independent of the number of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.data import Loader
from penstock.nn.head import OutputHead
from penstock.obs.sinks import Record
from penstock.parallel.mesh import World
from penstock.train.data_setup import Heldout
from penstock.train.evaluate import batches_of_share, positions_of_share
from penstock.train.objective import DeviceBatch, Finish
from penstock.train.state import TrainState
from penstock.train.step import loss_sum, micro_batches
from penstock.train.tune.kto import Divergence, SingleAnswers
from penstock.train.tune.preference import PreferencePairs
from penstock.train.tune.reward_sums import NAMES, RewardSums, reward_metrics


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """Mean of a loss of answers over pairs, or examples, of all ranks and micro-batches."""

    answers: PreferencePairs | SingleAnswers
    """Their loss, and how a batch holds them."""
    divergence: Divergence | None = None
    """The divergence that KTO measures answers against; None: the loss has none."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that it reads from a batch besides those of every step."""
        return self.answers.fields

    def begin_step(self, state: TrainState, batch: DeviceBatch, world: World, *, rows: int) -> RewardSums:
        """Return the accumulator of rewards.

        Raises:
            CorpusError: the batch has a pair in place of a single answer, or the reverse.
        """
        self.answers.check(batch)
        return self._sums_of(state, state.loader, batch["sample_ids"].cpu().numpy(), world, rows=rows)

    def _sums_of(
        self, state: TrainState, loader: Loader, samples: Int64, world: World, *, rows: int
    ) -> RewardSums:
        """Return a new accumulator for this rank's samples of a loader; every rank calls it."""
        sums = RewardSums(world.device)
        if self.divergence is not None:
            self.divergence.measure(sums, state, loader, samples, world, rows=rows)
        return sums

    def prepare(self, part: DeviceBatch) -> DeviceBatch:
        """Return the micro-batch with each answer in a sequence of its own."""
        return self.answers.prepare(part)

    def count(self, batch: DeviceBatch, columns: slice) -> int:
        """Return the number of pairs, or examples, that are counted in these columns."""
        return self.answers.count(batch, columns)

    def finish(self, part: DeviceBatch, sums: RewardSums) -> Finish:
        """Return the function that sums the losses of a part's micro-batches."""

        def losses(hidden: Tensor, head: OutputHead) -> Tensor:
            return torch.stack(
                [self.answers.loss_of(rows, head, one, sums) for rows, one in each_part(hidden, part)]
            ).sum()

        return losses

    def metrics(self, sums: Sequence[float]) -> Record:
        """Return rewards, accuracy and log-probabilities; of pairs the margin, of KTO the divergence."""
        return reward_metrics(sums)

    @torch.no_grad()
    def validate(self, state: TrainState, world: World, *, rows: int) -> Record:
        """Return the record of a validation: held-out loss and rewards; every rank must call it.

        Args:
            rows: rows per forward pass. All ranks make equally many passes; excess rows are masked.

        Raises:
            CorpusError: a token id is outside the model's vocabulary.
        """
        heldout, mesh, model = state.heldout, state.mesh, state.model
        assert heldout is not None
        was_training = model.training
        model.eval()
        share = mesh.data_rank, mesh.layout.num_data
        found: list[float] = []
        for samples in samples_by_corpus(heldout):
            mine = positions_of_share(len(samples), share=share, rows=rows)
            mine = samples[mine[mine < len(samples)]]
            sums = self._sums_of(state, heldout.loader, mine, world, rows=rows)
            for batch, _ in batches_of_share(model, heldout, samples, share=share, rows=rows):
                self.answers.check(batch)
                (part,) = micro_batches(
                    batch,
                    rows=rows,
                    device=world.device,
                    sequence_slice=mesh.sequence_slice(batch["labels"].shape[1]),
                    fields=self.fields,
                    prepare=self.prepare,
                )
                loss_sum(model, part, self.finish(part, sums))
            found += sums.sums.tolist()
        model.train(was_training)
        each = np.array(world.sum(*found)).reshape(-1, len(NAMES)) / mesh.copies
        terms, losses = each[:, NAMES.index("terms")], each[:, NAMES.index("losses")]
        by_corpus = zip(heldout.loader.corpora, losses.tolist(), terms.tolist(), strict=True)
        return {
            "step": state.step,
            "validation_loss": float(losses.sum() / max(terms.sum(), 1)),
            **reward_metrics(each.sum(0).tolist(), "validation_"),
            "corpus_validation_loss": {name: loss / count for name, loss, count in by_corpus if count},
        }


def each_part(hidden: Tensor, part: DeviceBatch) -> Iterator[tuple[Tensor, DeviceBatch]]:
    """Yield the hidden states and fields of each micro-batch of a part that may be several; see `joined`."""
    if not isinstance(part["segments"], tuple):
        yield hidden, part
        return
    rows = [len(segments) for segments in part["segments"]]
    several = {**part, "labels": torch.split(part["labels"], rows)}
    for index, one in enumerate(torch.split(hidden, rows)):
        yield one, {name: values[index] for name, values in several.items()}


def samples_by_corpus(heldout: Heldout) -> list[Int64]:
    """Return the held-out samples of each corpus."""
    samples = np.arange(heldout.rows)
    of = heldout.loader.corpora_of(samples)
    return [samples[of == index] for index in range(len(heldout.loader.corpora))]

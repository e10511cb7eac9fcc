"""Validation of a preference loss: held-out loss and rewards, independent of the number of ranks."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from penstock.core.arrays import Int64
from penstock.data import Loader
from penstock.data.types import IGNORED_LABEL
from penstock.obs.sinks import Record
from penstock.parallel.mesh import Mesh, World
from penstock.train.data_setup import Heldout
from penstock.train.evaluate import check_heldout
from penstock.train.objective import DeviceBatch, Objective
from penstock.train.state import TrainState
from penstock.train.step import loss_sum, micro_batches
from penstock.train.tune.reward_sums import NAMES, RewardSums, reward_metrics


class PreferenceObjective(Objective, Protocol):
    """Loss over answers, with what its validation needs besides."""

    def sums_of(
        self, state: TrainState, loader: Loader, samples: Int64, world: World, *, rows: int
    ) -> RewardSums:
        """Return a new accumulator for this rank's samples of a loader; every rank calls it."""
        ...

    def check(self, batch: DeviceBatch) -> None:
        """Refuse a batch that the loss cannot be computed of."""
        ...


@torch.no_grad()
def heldout_preferences(
    objective: PreferenceObjective,
    state: TrainState,
    world: World,
    *,
    rows: int,
) -> Record:
    """Return the record of a validation; every rank must call it.

    Args:
        rows: rows per forward pass. All ranks make equally many passes; excess rows are masked.

    Raises:
        CorpusError: a token id is outside the model's vocabulary.
    """
    heldout, mesh, model = state.heldout, state.mesh, state.model
    assert heldout is not None
    was_training = model.training
    model.eval()
    found: list[float] = []
    for samples in samples_by_corpus(heldout):
        mine = samples[np.arange(len(samples)) // rows % mesh.layout.num_data == mesh.data_rank]
        sums = objective.sums_of(state, heldout.loader, mine, world, rows=rows)
        for batch, of_batch in shares_of(heldout, samples, mesh, rows=rows):
            check_heldout(batch, of_batch, heldout, model)
            objective.check(batch)
            (part,) = micro_batches(
                batch,
                rows=rows,
                device=world.device,
                sequence_slice=mesh.sequence_slice(batch["labels"].shape[1]),
                fields=objective.fields,
                prepare=objective.prepare,
            )
            loss_sum(model, part, objective.finish(part, sums))
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


def samples_by_corpus(heldout: Heldout) -> list[Int64]:
    """Return the held-out samples of each corpus."""
    samples = np.arange(heldout.rows)
    of = heldout.loader.corpora_of(samples)
    return [samples[of == index] for index in range(len(heldout.loader.corpora))]


def shares_of(
    heldout: Heldout, samples: Int64, mesh: Mesh, *, rows: int
) -> Iterator[tuple[DeviceBatch, Int64]]:
    """Yield the batches of this rank and their samples, equally many on each; the excess rows have no label
    and no pair."""
    part, parts = mesh.data_rank, mesh.layout.num_data
    for index in range(-(-len(samples) // (rows * parts))):
        first = (index * parts + part) * rows
        wanted = np.arange(first, first + rows)
        of_batch = samples[np.minimum(wanted, len(samples) - 1)]
        batch = heldout.loader.gather(of_batch)
        excess = torch.from_numpy(wanted >= len(samples))
        batch["labels"][excess] = IGNORED_LABEL
        batch["rejected"][excess] = False
        yield batch, of_batch

"""KTO: single answers that are wanted or not, and the divergence that they are measured against.

The loss compares an answer's log-ratio with z, an estimate of the divergence of the model from the reference:
the mean log-ratio of *mismatched* answers, each a prompt with the answer to another (mismatches.py), and at
least 0 (Ethayarajh et al., arXiv:2402.01306, section 4.1). It is the mean over all examples of the step, of
all ranks and micro-batches, found by a forward pass without gradients before the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.core.arrays import Int64
from penstock.data import Loader
from penstock.data.types import IGNORED_LABEL
from penstock.nn.head import OutputHead
from penstock.parallel.collectives import CollectiveGroup
from penstock.parallel.mesh import World
from penstock.train.objective import DeviceBatch
from penstock.train.state import TrainState
from penstock.train.tune.corpus_pass import Pass
from penstock.train.tune.mismatches import Mismatches, mismatched_log_probs
from penstock.train.tune.pairs import check_single, whole_sequences
from penstock.train.tune.preference import answer_sums, counted_once, num_slices
from penstock.train.tune.preference_loss import Answers, kto
from penstock.train.tune.reward_sums import NAMES, RewardSums


@dataclass(frozen=True, slots=True)
class SingleAnswers:
    """KTO loss of single answers."""

    beta: float
    desirable_weight: float
    undesirable_weight: float
    slices: CollectiveGroup | None = None
    """Ranks with the sequence slices of a row; None: rows are whole."""
    fields: ClassVar[tuple[str, ...]] = ("rejected", "reference")

    def check(self, batch: DeviceBatch) -> None:
        """Refuse a batch with a pair."""
        check_single(batch)

    def prepare(self, part: DeviceBatch) -> DeviceBatch:
        """Return the micro-batch with its sequences."""
        return whole_sequences(part)

    def count(self, batch: DeviceBatch, columns: slice) -> int:
        """Return the number of examples whose first label is in these columns."""
        length = batch["labels"].shape[1]
        inside = range(length)[columns]
        part = whole_sequences(batch)
        learned = (batch["labels"] != IGNORED_LABEL).flatten().nonzero()[:, 0]
        of = part["segments"].flatten()[learned]
        first = learned[torch.cat((of.new_ones(1, dtype=torch.bool), of[1:] != of[:-1]))[: len(of)]] % length
        return int(((first >= inside.start) & (first < inside.stop)).sum())

    def loss_of(self, hidden: Tensor, head: OutputHead, part: DeviceBatch, sums: RewardSums) -> Tensor:
        """Return the summed loss of the examples, and add their rewards."""
        found, examples = answer_sums(hidden, head, part, self.slices), part["examples"]
        answers = Answers(found.log_probs[examples], found.reference[examples], found.tokens[examples])
        wanted = part["wanted"][examples]
        losses, rewards = kto(
            answers,
            wanted,
            sums.divergence,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        sums.add(
            chosen=(rewards[wanted], answers.log_probs[wanted]),
            rejected=(rewards[~wanted], answers.log_probs[~wanted]),
            right=(rewards > 0) == wanted,
            loss=losses,
            share=1 / num_slices(self.slices),
        )
        return counted_once(losses.sum(), self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Estimate of the model's divergence from the reference, from mismatched answers."""

    mismatches: Mapping[str, Mismatches]
    """By corpus."""
    length: int
    """Tokens of a row of mismatched answers."""
    slices: CollectiveGroup | None = None
    """Ranks with the sequence slices of a row; None: rows are whole."""

    def measure(
        self, sums: RewardSums, state: TrainState, loader: Loader, samples: Int64, world: World, *, rows: int
    ) -> None:
        """Set the divergence in `sums` to that over all ranks' samples of a loader; every rank calls it.

        Args:
            samples: [n] samples of this rank.
            rows: rows of a forward pass.
        """
        length, sequences, reference = self.length, [], []
        for span in (span for row in loader.explain(samples) for span in row if span.corpus):
            of = self.mismatches[span.corpus]
            number = of.examples.number_at(span.shard, span.start)
            sequences.append(of.examples.mismatched(number, int(of.partners[number]), length=length))
            reference.append(of.reference[number])
        run = Pass(model=state.model, world=world, mesh=state.mesh, rows=rows)
        found = mismatched_log_probs(run, sequences, length=length, slices=self.slices)
        ratios = float(found.sum()) - sum(reference)
        if state.mesh.has_loss:
            mine = torch.tensor([len(sequences), ratios], dtype=torch.float64, device=world.device)
            sums.sums[NAMES.index("mismatched") :] = mine / num_slices(self.slices)
        count, total = world.sum(*sums.sums[NAMES.index("mismatched") :].tolist())
        sums.divergence = max(total / max(count, 1.0), 0.0)

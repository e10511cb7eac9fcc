"""Preference objectives: a mean over pairs, or examples, of all ranks and micro-batches.

Log-probabilities of tokens are summed over each answer, and over the ranks that hold slices of its row. Every
such rank then computes the loss of all answers in the row, but has the gradient of its own tokens only; so
the loss counts for one of them, and the gradients of the slices add up to the whole.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.data.types import IGNORED_LABEL
from penstock.nn.head import OutputHead
from penstock.nn.token_log_probs import token_log_probs
from penstock.parallel.collectives import CollectiveGroup, all_reduce
from penstock.train.objective import DeviceBatch
from penstock.train.tune.pairs import check_pairs, split_pairs, turns
from penstock.train.tune.preference_loss import Answers, PairLoss
from penstock.train.tune.reward_sums import RewardSums


@dataclass(frozen=True, slots=True)
class PreferencePairs:
    """Loss of pairs of a chosen and a rejected answer."""

    loss: PairLoss
    beta: float
    margin: float
    has_reference: bool = True
    """True if the loss compares with the column `reference`."""
    slices: CollectiveGroup | None = None
    """Ranks with the sequence slices of a row; None: rows are whole."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that it reads from a batch besides those of every step."""
        return ("rejected", "reference") if self.has_reference else ("rejected",)

    def check(self, batch: DeviceBatch) -> None:
        """Refuse a batch with a conversation that is not part of a pair."""
        check_pairs(batch)

    def prepare(self, part: DeviceBatch) -> DeviceBatch:
        """Return the micro-batch with each side as a sequence of its own."""
        return split_pairs(part)

    def count(self, batch: DeviceBatch, columns: slice) -> int:
        """Return the number of pairs whose sides meet in these columns."""
        length = batch["labels"].shape[1]
        inside = range(length)[columns]
        column = turns(batch["rejected"], batch["cu_seqlens"]) % length
        return int(((column >= inside.start) & (column < inside.stop)).sum())

    def loss_of(self, hidden: Tensor, head: OutputHead, part: DeviceBatch, sums: RewardSums) -> Tensor:
        """Return the summed loss of the pairs, and add their rewards."""
        answers = answer_sums(hidden, head, part, self.slices)
        first = part["chosen"]
        chosen, rejected = (
            Answers(answers.log_probs[side], answers.reference[side], answers.tokens[side])
            for side in (first, first + 1)
        )
        found = self.loss(chosen, rejected, beta=self.beta, margin=self.margin)
        sums.add(
            chosen=(found.chosen, chosen.log_probs),
            rejected=(found.rejected, rejected.log_probs),
            right=found.chosen > found.rejected,
            loss=found.losses,
            share=1 / num_slices(self.slices),
        )
        return counted_once(found.losses.sum(), self.slices)


def answer_sums(
    hidden: Tensor, head: OutputHead, part: DeviceBatch, slices: CollectiveGroup | None
) -> Answers:
    """Return the sums over each sequence of a micro-batch: [sequences], in float64.

    Args:
        hidden: [batch, seq, hidden] of this rank's slice of the rows.
        part: as `split_pairs` makes it, then sliced.
        slices: ranks with the other slices.
    """
    labels = part["labels"].flatten()
    learned = (labels != IGNORED_LABEL).double()
    log_probs = token_log_probs(hidden.flatten(0, 1), head, labels).double()
    reference = part["reference"].flatten().double() * learned if "reference" in part else 0 * learned
    lengths = torch.bincount(part["segments"].flatten(), minlength=len(part["cu_seqlens"]) - 1)
    each = torch.stack((log_probs, reference, learned), 1)
    total = torch.segment_reduce(each, "sum", lengths=lengths, axis=0, initial=0)  # no atomics: one order
    if slices is not None:
        total = total + (all_reduce(total.detach(), "sum", slices) - total.detach())
    return Answers(total[:, 0], total[:, 1].detach(), total[:, 2].detach())


def num_slices(slices: CollectiveGroup | None) -> int:
    """Return the number of ranks with slices of a row."""
    return 1 if slices is None else slices.size


def counted_once(loss: Tensor, slices: CollectiveGroup | None) -> Tensor:
    """Return a loss that every rank with a slice computes, with its gradient and its share of the value."""
    return (loss - loss.detach() * (1 - 1 / num_slices(slices))).float()

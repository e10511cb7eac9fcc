"""Rewards of a step or a validation, as sums that can be added over micro-batches and ranks."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from penstock.obs.sinks import Record

NAMES: Final = (
    "chosen_answers",
    "chosen_rewards",
    "chosen_log_probs",
    "rejected_answers",
    "rejected_rewards",
    "rejected_log_probs",
    "terms",
    "right",
    "losses",
    "mismatched",
    "mismatched_ratios",
)
"""Sums in their order; terms are pairs, or examples. The last two, of KTO: mismatched answers, log-ratios."""


class RewardSums:
    """Sums over this rank's share, float64."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(NAMES), dtype=torch.float64, device=device)
        self.divergence = 0.0
        """KTO: mean log-ratio of the mismatched answers of all ranks, at least 0."""

    def add(
        self,
        *,
        chosen: tuple[Tensor, Tensor],
        rejected: tuple[Tensor, Tensor],
        right: Tensor,
        loss: Tensor,
        share: float,
    ) -> None:
        """Add some answers.

        Args:
            chosen: [n] rewards and log-probabilities of chosen answers, or of wanted ones.
            rejected: likewise.
            right: [terms] True where the rewards agree with the preference.
            loss: [terms] losses.
            share: weight, for ranks that all add the same answers.
        """
        sides = [
            torch.stack(
                (torch.full((), len(side[0]), device=right.device), *(x.detach().sum() for x in side))
            )
            for side in (chosen, rejected)
        ]
        terms = torch.stack(
            (torch.full((), len(right), device=right.device), right.sum(), loss.detach().sum())
        )
        self.sums[: NAMES.index("mismatched")] += share * torch.cat((*sides, terms))

    def values(self) -> Sequence[Tensor]:
        """Return the sums: [len(NAMES)] float64."""
        return [self.sums]


def reward_metrics(sums: Sequence[float], prefix: str = "") -> Record:
    """Return the metrics of sums over all ranks; those of a side without an answer are left out.

    >>> found = reward_metrics([2, 3.0, -8.0, 2, 1.0, -9.0, 2, 1, 1.4, 0, 0])
    >>> found["reward_margin"], found["reward_accuracy"], found["log_prob_chosen"]
    (1.0, 0.5, -4.0)
    """
    of = dict(zip(NAMES, sums, strict=True))
    found: Record = {}
    for side in ("chosen", "rejected"):
        if count := of[f"{side}_answers"]:
            found[f"{prefix}reward_{side}"] = of[f"{side}_rewards"] / count
            found[f"{prefix}log_prob_{side}"] = of[f"{side}_log_probs"] / count
    if len(found) == 4:
        found[f"{prefix}reward_margin"] = found[f"{prefix}reward_chosen"] - found[f"{prefix}reward_rejected"]
    if of["terms"]:
        found[f"{prefix}reward_accuracy"] = of["right"] / of["terms"]
    if count := of["mismatched"]:
        found[f"{prefix}kto_divergence"] = max(of["mismatched_ratios"] / count, 0.0)
    return found

"""Preference losses from the log-probabilities of whole answers.

With the log-ratio of an answer, log p(y | x) - log p_ref(y | x), summed over its learned tokens; w the chosen
(or wanted) answer, l the rejected one, s the logistic function:

    dpo     -log s(beta (ratio_w - ratio_l))                                         arXiv:2305.18290
    ipo     (ratio_w / |y_w| - ratio_l / |y_l| - 1 / (2 beta))^2                     arXiv:2310.12036
    simpo   -log s(beta (log p(y_w) / |y_w| - log p(y_l) / |y_l|) - margin)          arXiv:2405.14734
    kto     w_d (1 - s(beta (ratio - z))) if wanted, w_u (1 - s(beta (z - ratio)))   arXiv:2402.01306

IPO divides by the number of tokens, as TRL does and its authors confirmed to TRL. SimPO has no reference. z
is the mean log-ratio of mismatched answers, at least 0 (see kto.py). Sums are float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one side of some pairs, or of some examples."""

    log_probs: Float[Tensor, "n"]
    """Log-probability under the model, summed over learned tokens, in nats."""
    reference: Float[Tensor, "n"]
    """The same under the reference model; no graph."""
    tokens: Int[Tensor, "n"]
    """Number of learned tokens."""

    @property
    def ratios(self) -> Float[Tensor, "n"]:
        """Log-ratio of each answer."""
        return self.log_probs - self.reference


@dataclass(frozen=True, slots=True)
class PairLosses:
    """Losses of pairs, and the rewards that they imply."""

    losses: Float[Tensor, "pairs"]
    chosen: Float[Tensor, "pairs"]
    """Reward of the chosen answer; no graph."""
    rejected: Float[Tensor, "pairs"]
    """Reward of the rejected answer; no graph."""


PairLoss = Callable[..., PairLosses]
"""Function (chosen, rejected, beta=, margin=) -> losses."""


def dpo(chosen: Answers, rejected: Answers, *, beta: float, margin: float = 0.0) -> PairLosses:  # noqa: ARG001
    """Return the losses of direct preference optimisation."""
    losses = -functional.logsigmoid(beta * (chosen.ratios - rejected.ratios))
    return PairLosses(losses, beta * chosen.ratios.detach(), beta * rejected.ratios.detach())


def ipo(chosen: Answers, rejected: Answers, *, beta: float, margin: float = 0.0) -> PairLosses:  # noqa: ARG001
    """Return the losses of identity preference optimisation, per token."""
    means = [side.ratios / side.tokens.clamp(min=1) for side in (chosen, rejected)]
    losses = (means[0] - means[1] - 1 / (2 * beta)) ** 2
    return PairLosses(losses, beta * chosen.ratios.detach(), beta * rejected.ratios.detach())


def simpo(chosen: Answers, rejected: Answers, *, beta: float, margin: float) -> PairLosses:
    """Return the losses of SimPO; `margin` is the paper's gamma."""
    rewards = [beta * side.log_probs / side.tokens.clamp(min=1) for side in (chosen, rejected)]
    losses = -functional.logsigmoid(rewards[0] - rewards[1] - margin)
    return PairLosses(losses, rewards[0].detach(), rewards[1].detach())


PAIR_LOSSES: Final[dict[str, PairLoss]] = {"dpo": dpo, "ipo": ipo, "simpo": simpo}


def kto(
    answers: Answers,
    is_wanted: Tensor,
    mismatched: Tensor | float,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Return the losses of KTO, and the rewards without a graph.

    Args:
        is_wanted: [n] bool.
        mismatched: z, at least 0.
    """
    gain = beta * (answers.ratios - mismatched)
    wanted = desirable_weight * (1 - torch.sigmoid(gain))
    unwanted = undesirable_weight * (1 - torch.sigmoid(-gain))
    return torch.where(is_wanted, wanted, unwanted), beta * answers.ratios.detach()

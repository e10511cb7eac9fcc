"""Adaptive mixtures: corpus weights computed from the corpora's training losses.

A policy is called at a fixed interval of steps. Its inputs are equal on all ranks and its memory is JSON
values, stored in the checkpoint, so a resumed run decides as an uninterrupted one would. Weights are rounded
to thousandths: the state records every mixture of the run.

To add a policy: a class with this protocol, and a row in POLICIES; it is called with the recipe's options.
"""

import heapq
import math
from collections.abc import Mapping
from typing import Any, Final, Protocol

from penstock.core.errors import ConfigError
from penstock.core.table import Table

POLICIES: Final = Table(
    "mixing policy", {"online_data_mixing": "penstock.data.schedule.adaptive:OnlineDataMixing"}
)
"""Name in a recipe -> class."""

_PARTS = 1000
"""Weights are whole thousandths."""


class Policy(Protocol):
    """Policy that computes the weights of the corpora."""

    def decide(self, losses: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
        """Return the weight of every corpus for the next interval.

        Args:
            losses: mean training loss of each corpus in the last interval, nats per token; absent if it was
                not trained on.
            weights: share of each corpus in that interval.
        """
        ...

    def state_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return the policy's memory."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the policy's memory."""
        ...


class OnlineDataMixing:
    """Online data mixing, ODM (Albalak, Pan, Raffel and Wang, 2023, arXiv:2312.02406, algorithm 1).

    Each corpus is an arm of an adversarial bandit (EXP3; Auer, Cesa-Bianchi, Freund and Schapire, 2002) whose
    reward is its training loss: train on what the model cannot do yet. At turn t, of K corpora,

        R_i   <- a R_i + (1 - a) loss_i / p_i          for each corpus trained on since the last turn
        eps_t  = min(1/K, sqrt(ln K / (K t)))
        p_i    = (1 - K eps_t) exp(eps_(t-1) R_i) / sum_j exp(eps_(t-1) R_j) + eps_t

    Differences from the paper: a turn is an interval of many steps with its mean losses, not one step with
    the loss of the corpora drawn; the first weights are the recipe's, not equal; a corpus of weight 0 is not
    an arm and keeps weight 0. The authors' program sums rewards and divides losses by ten; this is the
    paper's moving average.


    Args:
        smoothing: a in the formula, in [0, 1).
    """

    def __init__(self, *, smoothing: float = 0.9) -> None:
        if not 0 <= smoothing < 1:
            raise ConfigError("smoothing of online_data_mixing must be in [0, 1)", got=smoothing)
        self._smoothing = smoothing
        self._rewards: dict[str, float] = {}
        self._turn = 0

    def decide(self, losses: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
        """Return the weights of the next interval; see Policy."""
        arms = [name for name, weight in weights.items() if weight]
        before, self._turn = exploration(len(arms), turn=self._turn), self._turn + 1
        rate = exploration(len(arms), turn=self._turn)
        for name in arms:
            reward = self._rewards.setdefault(name, 0.0)
            if name in losses:
                estimate = losses[name] / weights[name]
                self._rewards[name] = self._smoothing * reward + (1 - self._smoothing) * estimate
        highest = max(self._rewards[name] for name in arms)  # subtracted from all: same shares, no overflow
        powers = {name: math.exp(before * (self._rewards[name] - highest)) for name in arms}
        scale = (1 - len(arms) * rate) / math.fsum(powers.values())
        return thousandths({name: powers[name] * scale + rate if name in powers else 0.0 for name in weights})

    def state_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return the policy's memory."""
        return {"turn": self._turn, "rewards": dict(self._rewards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the policy's memory."""
        self._turn, self._rewards = int(state["turn"]), dict(state["rewards"])


def exploration(num_arms: int, *, turn: int) -> float:
    """Return the exploration rate of ODM at a turn, counted from 1; turn 0 is the start.

    >>> exploration(4, turn=0), round(exploration(4, turn=100), 4)
    (0.25, 0.0589)
    """
    if not turn:
        return 1 / num_arms
    return min(1 / num_arms, math.sqrt(math.log(num_arms) / (num_arms * turn)))


def thousandths(weights: Mapping[str, float]) -> dict[str, float]:
    """Round weights to whole thousandths that sum to one; each above zero keeps at least one thousandth.

    Largest remainder, ties by name. Above 500 corpora the unit is ten times finer, and so on.


    >>> thousandths({"web": 2, "code": 1, "wiki": 0})
    {'web': 0.667, 'code': 0.333, 'wiki': 0.0}
    """
    total = math.fsum(weights.values())
    if not total:
        raise ConfigError(
            "The weights sum to zero", got=dict(weights), fix="Give one corpus a weight above 0."
        )
    parts = _PARTS
    while parts < 2 * len(weights):
        parts *= 10
    exact = {name: weight / total * parts for name, weight in weights.items()}
    whole = {name: max(math.floor(part), 1 if part > 0 else 0) for name, part in exact.items()}
    missing = parts - sum(whole.values())
    for name in sorted(whole, key=lambda name: (whole[name] - exact[name], name))[: max(0, missing)]:
        whole[name] += 1
    largest = [(-count, name) for name, count in whole.items()]
    heapq.heapify(largest)
    for _ in range(-missing):  # small ones were raised to one part: subtract the excess from the largest
        count, name = largest[0]
        heapq.heapreplace(largest, (count + 1, name))
        whole[name] -= 1
    return {name: count / parts for name, count in whole.items()}

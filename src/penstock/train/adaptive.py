"""Adaptive mixture: corpus weights from losses by a policy, and its state in checkpoints.

The losses are sums over all ranks, so every rank accumulates the same numbers; rank 0 decides and broadcasts
(see loop.py). Imports no torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import CheckpointError
from penstock.data.schedule.adaptive import POLICIES, Policy
from penstock.train.recipe.data_config import AdaptiveConfig


class Adaptive:
    """Accumulates losses over an interval and computes the next mixture by a policy.

    Args:
        corpora: corpus names, in the order of the losses.
    """

    def __init__(self, config: AdaptiveConfig, corpora: Sequence[str]) -> None:
        self._config = config
        self._policy: Policy = POLICIES[config.policy](**config.options)
        self._corpora = list(corpora)
        self._sums = dict.fromkeys(corpora, 0.0)
        self._labels = dict.fromkeys(corpora, 0.0)

    def add(self, sums: Sequence[float], labels: Sequence[float]) -> None:
        """Add the losses of a step: per corpus the summed loss in nats, and its number of labels."""
        for name, loss, count in zip(self._corpora, sums, labels, strict=True):
            self._sums[name] += loss
            self._labels[name] += count

    def is_due(self, step: int) -> bool:
        """True if a decision is due after `step` steps."""
        return step >= max(self._config.warmup_steps, 1) and step % self._config.every == 0

    def decide(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return the next weights, given the present ones, and start another interval."""
        losses = {name: self._sums[name] / count for name, count in self._labels.items() if count}
        decided = self._policy.decide(losses, weights)
        self._sums, self._labels = dict.fromkeys(self._sums, 0.0), dict.fromkeys(self._labels, 0.0)
        return decided

    def state_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return the state, equal on all ranks."""
        return {
            "policy": self._config.policy,
            "memory": self._policy.state_dict(),
            "sums": dict(self._sums),
            "labels": dict(self._labels),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; ignored if the policy is another one.

        Raises:
            CheckpointError: the state is damaged.
        """
        if state.get("policy") != self._config.policy:
            return
        try:
            self._policy.load_state_dict(state["memory"])
            for mine, saved in ((self._sums, state["sums"]), (self._labels, state["labels"])):
                mine |= {name: float(saved[name]) for name in mine.keys() & saved.keys()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"The state of data.adaptive in the checkpoint is damaged: {error!r}",
                fix="Resume with --set data.adaptive.policy=none, or from another checkpoint.",
            ) from None

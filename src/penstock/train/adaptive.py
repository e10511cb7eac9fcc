"""A mixture that follows the losses: what a policy is told, when, and what of it a checkpoint holds.

The losses are sums over all ranks, so every rank adds up the same numbers; rank 0 decides, and the others
are told (see loop.py). Imports no torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import CheckpointError
from penstock.data.adaptive import POLICIES, Policy
from penstock.train.data_config import AdaptiveConfig


class Adaptive:
    """Adds up the losses of an interval and asks a policy for the next mixture.

    Args:
        corpora: names, in the order in which losses come.
    """

    def __init__(self, config: AdaptiveConfig, corpora: Sequence[str]) -> None:
        self._config = config
        self._policy: Policy = POLICIES[config.policy](**config.options)
        self._corpora = list(corpora)
        self._sums = dict.fromkeys(corpora, 0.0)
        self._labels = dict.fromkeys(corpora, 0.0)

    def add(self, sums: Sequence[float], labels: Sequence[float]) -> None:
        """Add what a step found: for each corpus the summed loss in nats, and over how many labels."""
        for name, loss, count in zip(self._corpora, sums, labels, strict=True):
            self._sums[name] += loss
            self._labels[name] += count

    def is_due(self, step: int) -> bool:
        """Whether a decision is due after so many steps."""
        return step >= max(self._config.warmup_steps, 1) and step % self._config.every == 0

    def decide(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return the next weights, given those in force, and begin another interval."""
        losses = {name: self._sums[name] / count for name, count in self._labels.items() if count}
        decided = self._policy.decide(losses, weights)
        self._sums, self._labels = dict.fromkeys(self._sums, 0.0), dict.fromkeys(self._labels, 0.0)
        return decided

    def state_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return what it remembers, equal on all ranks."""
        return {
            "policy": self._config.policy,
            "memory": self._policy.state_dict(),
            "sums": dict(self._sums),
            "labels": dict(self._labels),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was remembered; another policy, or none, is begun afresh.

        Raises:
            CheckpointError: it is damaged.
        """
        if state.get("policy") != self._config.policy:
            return
        try:
            self._policy.load_state_dict(state["memory"])
            for mine, saved in ((self._sums, state["sums"]), (self._labels, state["labels"])):
                mine |= {name: float(saved[name]) for name in mine.keys() & saved.keys()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"The memory of data.adaptive in the checkpoint is damaged: {error!r}",
                fix="Resume with --set data.adaptive.policy=none, or from another checkpoint.",
            ) from None

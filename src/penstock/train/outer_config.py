"""The `[outer]` section of a recipe: copies of the model that meet every so many steps."""

from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.train.data_config import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """Infrequent synchronisation of the copies of `parallel.replicate`, here called islands.

    Within an island gradients are averaged at every step; between islands parameters are, every so many.
    The defaults are those of DiLoCo (Douillard et al., 2023) and Streaming DiLoCo (2025).
    """

    every: int = 0
    """Steps between two meetings of a fragment; 0: never, gradients are averaged over all ranks at each
    step. DiLoCo pays where the network between islands cannot carry that; 30 to 500 was tried there."""
    rule: Literal["average", "nesterov"] = "nesterov"
    """average: all go on from the mean (local SGD). nesterov: what the islands moved by, on average, is the
    gradient of an outer SGD with Nesterov momentum (DiLoCo)."""
    learning_rate: float = 0.7
    """Of nesterov."""
    momentum: float = 0.9
    """Of nesterov."""
    fragments: int = 1
    """Parts of the model, each some of its blocks, that meet at different steps: the peak of the traffic is
    so many times lower, and so is the memory of an exchange."""
    overlap: int = 0
    """Steps that an exchange may take while training goes on; 0: it is waited for."""
    mixing: float = 0.0
    """With overlap: share of an island's own parameters that stays when an exchange arrives; 0: none, the
    steps taken meanwhile are forgotten. Streaming DiLoCo takes 0.5 for an overlap of 5."""
    bits: Literal[32, 8, 4] = 32
    """Of a number on its way between islands: float32, or integers with a scale a block. Sums are float32."""

    min_islands: int = 0
    """Islands with which a run goes on, from its newest checkpoint, when it has lost others; 0: it ends, as
    one without islands does. For jobs of `penstock train --processes`, with parallel.replicate = -1; under
    torchrun, its --nnodes and --max-restarts say so."""

    def __post_init__(self) -> None:
        at_least("outer.every", self.every, 0)
        at_least("outer.fragments", self.fragments, 1)
        at_least("outer.overlap", self.overlap, 0)
        at_least("outer.min_islands", self.min_islands, 0)
        if self.learning_rate <= 0:
            raise ConfigError("outer.learning_rate must be above 0", got=self.learning_rate)
        if not 0 <= self.momentum < 1:
            raise ConfigError("outer.momentum must be at least 0 and below 1", got=self.momentum)
        if not 0 <= self.mixing < 1:
            raise ConfigError("outer.mixing must be at least 0 and below 1", got=self.mixing)
        if self.every:
            self._check_times()

    def _check_times(self) -> None:
        """Refuse exchanges that do not fit between two meetings."""
        if self.fragments > self.every:
            raise ConfigError(
                f"outer.fragments must be at most outer.every ({self.every}): one may meet at each step",
                got=self.fragments,
            )
        if self.overlap >= self.every:
            raise ConfigError(
                f"outer.overlap must be below outer.every ({self.every}): an exchange ends before the next",
                got=self.overlap,
            )
        if self.mixing and not self.overlap:
            raise ConfigError(
                "outer.mixing needs outer.overlap: without one, islands took no steps meanwhile",
                got=self.mixing,
                fix="Set outer.overlap, or leave outer.mixing at 0.",
            )


def outer_bytes_per_parameter(config: OuterConfig) -> float:
    """Return what a rank keeps for the outer optimizer, per parameter: float32 weights, and their momentum.

    >>> outer_bytes_per_parameter(OuterConfig(every=32)), outer_bytes_per_parameter(OuterConfig())
    (8.0, 0.0)
    """
    if not config.every:
        return 0.0
    return 8.0 if config.rule == "nesterov" else 4.0

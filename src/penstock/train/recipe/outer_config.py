"""The [outer] section of a recipe: replicas of the model that sync every few steps (DiLoCo)."""

from dataclasses import dataclass
from typing import Literal

from penstock.core.checks import at_least
from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """Infrequent synchronisation of the replicas of `parallel.replicate`, called islands.

    Within an island gradients are averaged at every step; between islands parameters are, every `every`
    steps. The defaults are those of DiLoCo (Douillard et al., 2023) and Streaming DiLoCo (2025).
    """

    every: int = 0
    """Steps between two syncs of a fragment; 0: off, gradients are averaged over all ranks at each step.
    DiLoCo pays where the network between islands cannot carry that; the papers tried 30 to 500."""
    rule: Literal["average", "nesterov"] = "nesterov"
    """average: all islands continue from the mean (local SGD). nesterov: the islands' mean change is the
    gradient of an outer SGD with Nesterov momentum (DiLoCo)."""
    learning_rate: float = 0.7
    """Learning rate of nesterov."""
    momentum: float = 0.9
    """Momentum of nesterov."""
    fragments: int = 1
    """Parts of the model, each some of its blocks, that sync at different steps: divides the peak traffic,
    and the memory of an exchange, by their number."""
    overlap: int = 0
    """Steps that an exchange may take while training continues; 0: training waits."""
    mixing: float = 0.0
    """With overlap: share of an island's own parameters that is kept when an exchange completes; 0: none, so
    the steps taken meanwhile are lost. Streaming DiLoCo uses 0.5 for an overlap of 5."""
    bits: Literal[32, 8, 4] = 32
    """Bits per number exchanged between islands: float32, or integers with a scale per block. Sums are
    float32."""

    min_islands: int = 0
    """Minimum number of islands with which a run continues, from its newest checkpoint, after losing others;
    0: it ends. For jobs of `penstock train --processes` with parallel.replicate = -1; under torchrun, use its
    --nnodes and --max-restarts."""

    def __post_init__(self) -> None:
        at_least(0, "outer.every", self.every)
        at_least(1, "outer.fragments", self.fragments)
        at_least(0, "outer.overlap", self.overlap)
        at_least(0, "outer.min_islands", self.min_islands)
        if self.learning_rate <= 0:
            raise ConfigError("outer.learning_rate must be above 0", got=self.learning_rate)
        if not 0 <= self.momentum < 1:
            raise ConfigError("outer.momentum must be at least 0 and below 1", got=self.momentum)
        if not 0 <= self.mixing < 1:
            raise ConfigError("outer.mixing must be at least 0 and below 1", got=self.mixing)
        if self.every:
            self._check_times()

    def _check_times(self) -> None:
        """Refuse exchanges that do not fit between two syncs."""
        if self.fragments > self.every:
            raise ConfigError(
                f"outer.fragments must be at most outer.every ({self.every}): one fragment syncs per step",
                got=self.fragments,
            )
        if self.overlap >= self.every:
            raise ConfigError(
                f"outer.overlap must be below outer.every ({self.every}), so that exchanges do not overlap",
                got=self.overlap,
            )
        if self.mixing and not self.overlap:
            raise ConfigError(
                "outer.mixing needs outer.overlap: without it, islands take no steps during an exchange",
                got=self.mixing,
                fix="Set outer.overlap, or leave outer.mixing at 0.",
            )


def outer_bytes_per_parameter(config: OuterConfig) -> float:
    """Return the bytes per parameter of the outer optimizer on a rank: float32 weights, and momentum.

    >>> outer_bytes_per_parameter(OuterConfig(every=32)), outer_bytes_per_parameter(OuterConfig())
    (8.0, 0.0)
    """
    if not config.every:
        return 0.0
    return 8.0 if config.rule == "nesterov" else 4.0

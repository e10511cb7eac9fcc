"""The `[guard]` section of a recipe: how long a run waits for a rank that hangs, and which rank is slow."""

import math
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.train.data_config import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """What a run does about trouble."""

    hang_s: float = 600.0
    """Seconds without a finished step after which every rank writes down where it is, and the run ends. Four
    times as many for a process's first step, which may compile."""
    straggler_every: int = 50
    """Steps over which the ranks' own times are compared; 0: never. One small sum over ranks."""
    straggler_ratio: float = 1.5
    """A rank whose own time is this many times the median rank's is named."""

    def __post_init__(self) -> None:
        if not 0 < self.hang_s < math.inf:
            raise ConfigError("guard.hang_s must be a number of seconds above 0", got=self.hang_s)
        at_least("guard.straggler_every", self.straggler_every, 0)
        if not 1 < self.straggler_ratio < math.inf:
            raise ConfigError("guard.straggler_ratio must be above 1", got=self.straggler_ratio)

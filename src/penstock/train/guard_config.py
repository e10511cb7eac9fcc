"""The `[guard]` section of a recipe: steps not to take, ranks that hang, ranks that are slow."""

import math
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.train.data_config import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """What a run does about trouble."""

    max_skips: int = 3
    """Of 100 steps, how many may leave the weights unchanged because their loss or gradient is not finite, or
    jumps. At one more, the run goes back to the newest checkpoint before them, without the data since."""
    max_rewinds: int = 2
    """How often a process goes back so, before the run ends."""
    loss_spike: float = 0.0
    """A loss of more than this many times the median of the last 100 steps is a jump; 0: none is. Off unless
    asked for: a run that is well is better left alone."""
    gradient_spike: float = 0.0
    """The same of the gradient norm before clipping."""
    hang_s: float = 600.0
    """Seconds without a finished step after which every rank writes down where it is, and the run ends. Four
    times as many for a process's first step, which may compile."""
    stop_within_s: float = 0.0
    """Seconds after a request to stop (SIGTERM, Ctrl-C) within which the checkpoint must be there; else the
    run leaves without it, and resumes from the one before. Set it a little below what the scheduler grants.
    0: as long as it takes."""
    straggler_every: int = 50
    """Steps over which the ranks' own times are compared; 0: never. One small sum over ranks."""
    straggler_ratio: float = 1.5
    """A rank whose own time is this many times the median rank's is named."""

    def __post_init__(self) -> None:
        if not 0 < self.hang_s < math.inf:
            raise ConfigError("guard.hang_s must be a number of seconds above 0", got=self.hang_s)
        if not 0 <= self.stop_within_s < math.inf:
            raise ConfigError(
                "guard.stop_within_s must be seconds, or 0 for no limit", got=self.stop_within_s
            )
        at_least("guard.max_skips", self.max_skips, 0)
        at_least("guard.max_rewinds", self.max_rewinds, 0)
        for name in ("loss_spike", "gradient_spike"):
            ratio = getattr(self, name)
            if ratio and not 1 < ratio < math.inf:
                raise ConfigError(f"guard.{name} must be above 1, or 0 for never", got=ratio)
        at_least("guard.straggler_every", self.straggler_every, 0)
        if not 1 < self.straggler_ratio < math.inf:
            raise ConfigError("guard.straggler_ratio must be above 1", got=self.straggler_ratio)

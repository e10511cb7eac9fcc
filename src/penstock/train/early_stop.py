"""Early stop: a run ends when its held-out loss has not improved for some validations. Pure; no torch.

The state is three numbers, saved with each checkpoint, so a run that resumes decides as one that was never
stopped. Prechelt, "Early stopping - but when?", 1998, has the rule under the name UP_s.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class EarlyStop:
    """Best held-out loss so far, and validations since.

    >>> stop = EarlyStop(stop_after=2)
    >>> [stop.add(step, loss) for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.0))]
    [True, True, False, False]
    >>> stop.best_step, stop.is_over
    (20, True)
    """

    stop_after: int
    """Validations in a row without improvement that end the run."""
    min_improvement: float = 0.0
    """Nats per token by which the loss must fall below the best one."""
    best_loss: float = math.inf
    best_step: int = 0
    """Step of the best validation; 0: there was none."""
    waited: int = 0
    """Validations since then."""

    def add(self, step: int, loss: float) -> bool:
        """Take a validation into account; return True if it improves on the best."""
        if loss < self.best_loss - self.min_improvement or (not self.best_step and math.isfinite(loss)):
            self.best_loss, self.best_step, self.waited = loss, step, 0
            return True
        self.waited += 1
        return False

    @property
    def is_over(self) -> bool:
        """True if the run is to end."""
        return self.waited >= self.stop_after

    def state_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return the state as JSON."""
        state = asdict(self)
        del state["stop_after"], state["min_improvement"]  # of the recipe
        if not self.best_step:  # no loss was finite, and JSON has no infinity
            return {"waited": self.waited} if self.waited else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; an empty one is that of a run without validations."""
        self.best_loss = float(state.get("best_loss", math.inf))
        self.best_step, self.waited = int(state.get("best_step", 0)), int(state.get("waited", 0))

"""Step guard: steps with a non-finite or jumping loss or gradient are skipped; pure, no torch.

A skipped step leaves the weights unchanged and its data is not used again. If too many come together, their
cause is older: the run rewinds to a checkpoint before them and leaves out the data in between, as was done by
hand for PaLM (Chowdhery et al., JMLR 2023, section 5.1). All ranks decide alike, from equal numbers.

Jumps are refused only if the recipe says by how much: no ratio suits both a warm-up and a long run, and a
wrong skip loses data silently.
"""

import math
import statistics
from collections import deque

from penstock.core.errors import PenstockError
from penstock.train.recipe.config import GuardConfig

_WINDOW = 100  # steps
_ENOUGH = 20  # steps before a jump can be distinguished from the start of training


class Rewind(PenstockError):
    """Too many steps were skipped; the run should continue from before them, without their data.

    Args:
        first: number of the first skipped step, from 1.
        step: number of the last one.
    """

    def __init__(self, why: str, *, first: int, step: int) -> None:
        super().__init__(
            f"{why}; the weights were not changed",
            fix="Lower optim.learning_rate, lengthen schedule.warmup_steps, or set compute to 'float32', "
            "and run again: it resumes from the last checkpoint. If that one fails too, remove it to resume "
            "from the one before.",
        )
        self.why = why
        self.first = first
        self.step = step


class StepGuard:
    """Decides for each step of a run, in order, whether it may change the weights."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._skipped: list[int] = []

    def judge(self, loss: float, grad_norm: float, *, step: int) -> str:
        """Return why a step must be skipped; "" if it may be taken.

        Raises:
            Rewind: too many steps were skipped.

        >>> guard = StepGuard(GuardConfig())
        >>> guard.judge(2.5, 0.7, step=1), guard.judge(math.inf, 0.7, step=2)
        ('', 'The loss of step 2 is inf, its gradient norm 0.7')
        """
        why = self._wrong(loss, grad_norm)
        if why is None:
            self._losses.append(loss)
            self._norms.append(grad_norm)
            return ""
        self._skipped = [*(earlier for earlier in self._skipped if earlier > step - _WINDOW), step]
        said = f"The loss of step {step} is {loss:.6g}, its gradient norm {grad_norm:.6g}{why}"
        if len(self._skipped) > self._config.max_skips:
            raise Rewind(said, first=self._skipped[0], step=step)
        return said

    def _wrong(self, loss: float, grad_norm: float) -> str | None:
        """Return the reason for a skip, besides the numbers; None: none."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return ""
        limits = (
            ("loss", loss, self._losses, self._config.loss_spike),
            ("gradient norm", grad_norm, self._norms, self._config.gradient_spike),
        )
        for name, value, before, ratio in limits:
            if ratio and len(before) >= _ENOUGH and value > ratio * (usual := statistics.median(before)):
                return f" (the usual {name} is {usual:.4g})"
        return None

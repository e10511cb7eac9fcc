"""Interface between the engine and the model runner."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxtyping import Float, Float64
from torch import Tensor

from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.graph_plan import RecordedGraphs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of the model for one step."""

    hidden: Float[Tensor, "t hidden"]
    """Hidden states of the tokens that the batch needs; other rows are undefined."""
    logits: Float[Tensor, "r vocab"]
    """Logits of `StepBatch.logit_rows`, in that order; wider where an adapter of the step has new tokens, and
    -inf where a row's adapter has not."""
    drawn: Callable[[], list[int]] | None = None
    """Waits for the device and returns the token sampled from each row of `logits`; None: the step sampled
    none. Where it is given, the tensors above are valid until the next step, whose token ids may name rows
    that were not read."""


class StepRunner(Protocol):
    """Computes steps on one or several devices."""

    @property
    def adapters(self) -> Mapping[str, int]:
        """Adapter name -> index in `StepBatch.adapters`."""
        ...

    @property
    def recorded(self) -> RecordedGraphs | None:
        """Time and memory of the recorded graphs; None: there are none."""
        ...

    @property
    def num_new_tokens(self) -> Mapping[str, int]:
        """Adapter name -> tokens that it adds to the vocabulary; its logits have as many more columns."""
        ...

    def run(
        self, batch: StepBatch, settings: Float64[Tensor, "r 5"] | None = None, *, samples: bool = False
    ) -> StepOutput:
        """Launch one step.

        Args:
            settings: of `sampling.filters.settings_tensor`, for runners that sample; None: greedy.
            samples: sample every row of the logits, if this runner can.

        Raises:
            RunnerLost: no further step can be computed.
        """
        ...

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter on all devices; raises as `Adapters.add` does."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter on all devices; raises as `Adapters.remove` does."""
        ...

    def on_lost(self, call: Callable[[], None]) -> None:
        """Set a callback for when no further step can be computed; it is called from another thread."""
        ...

    def check(self) -> None:
        """Raise RunnerLost if no further step can be computed."""
        ...

    def close(self) -> None:
        """Free all resources. Idempotent."""
        ...

"""The live objects of a training run: what a step changes and a checkpoint saves."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penstock.checkpoint.tensors import training_tensors
from penstock.data import Loader
from penstock.parallel.ethernet import Ethernet
from penstock.parallel.mesh import Mesh
from penstock.parallel.pipeline import Pipeline
from penstock.train.adaptive import Adaptive
from penstock.train.control import Control
from penstock.train.guard import Guard
from penstock.train.guard_config import GuardConfig
from penstock.train.optim.optimizer import Optimizer
from penstock.train.outer import Outer
from penstock.train.outer_state import island_tensors
from penstock.train.supply import Heldout
from penstock.train.watch import Watch


@dataclass(slots=True)
class TrainState:
    """Model, optimizer and loader; the loader's step is the run's step."""

    model: nn.Module
    """Sharded; parameters as the recipe's `precision.weights` says."""
    optimizer: Optimizer
    loader: Loader
    """Its batches are those of this rank, and of the ranks that work on the same rows."""
    mesh: Mesh
    """Which rank does what."""
    heldout: Heldout | None
    """Rows of the held-out documents, the same on every rank."""
    ethernet: Ethernet
    """Schedules what a step gathers and reduces."""
    pipeline: Pipeline | None = None
    """What runs the stages, if the model is cut into some."""
    adaptive: Adaptive | None = None
    """What sets the mixture by the losses, if the recipe asks for it."""
    outer: Outer | None = None
    """What lets copies of the model that train by themselves meet, if the recipe asks for it."""
    control: Control | None = None
    """Takes up what is asked of the run from outside."""
    guard: Guard = field(default_factory=lambda: Guard(GuardConfig()))
    """Says which steps must not be taken."""
    watch: Watch = field(default_factory=Watch)
    """Looks at single steps, as the recipe asks."""

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.loader.step

    def changes_islands(self) -> bool:
        """Whether this is the moment to go on with another number of islands."""
        if self.outer is None or self.control is None or self.control.islands is None:
            return False
        return self.outer.has_met or not self.outer.meets_whole

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of this rank that a checkpoint holds; the live ones."""
        own = training_tensors(self.model, self.optimizer)
        return own if self.outer is None else island_tensors(self.outer, own)

    def shown(self) -> AbstractContextManager[None]:
        """Let the model be the run's for a while, not that of this rank's island."""
        return nullcontext() if self.outer is None else self.outer.shown()


Batch = dict[str, Any]  # Any: tensors; what the loader delivers

"""Live objects of a training run: what a step changes and a checkpoint saves."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from penstock.checkpoint.layout import NUMERICS
from penstock.checkpoint.tensors import training_tensors
from penstock.devices.kernel_table import KernelTable
from penstock.parallel.mesh import Mesh
from penstock.train.adaptive import Adaptive
from penstock.train.device_hours import DeviceHours
from penstock.train.early_stop import EarlyStop
from penstock.train.guard import StepGuard
from penstock.train.monitors.step_monitors import StepMonitors
from penstock.train.objective import Objective
from penstock.train.optim.optimizer import Optimizer
from penstock.train.recipe.config import GuardConfig

if TYPE_CHECKING:  # some take seconds to import, and few runs need all
    from penstock.data import Loader
    from penstock.parallel.ethernet.scheduler import Ethernet
    from penstock.parallel.ethernet.unshared import Unshared
    from penstock.parallel.pipeline import Pipeline
    from penstock.train.control.listener import Control
    from penstock.train.data_setup import Heldout
    from penstock.train.islands.outer_optimizer import Outer
    from penstock.train.live_tasks import LiveTasks


@dataclass(slots=True)
class TrainState:
    """Model, optimizer and loader; the loader's step is the run's step."""

    model: nn.Module
    """Sharded; its parameters are stored as `precision.weights` says."""
    optimizer: Optimizer
    loader: "Loader"
    """Delivers the batches of this rank, and of the ranks that work on the same rows."""
    mesh: Mesh
    """Device mesh."""
    heldout: "Heldout | None"
    """Held-out rows, the same on every rank."""
    ethernet: "Ethernet | Unshared"
    """Schedules the gathers and reductions of a step."""
    objective: Objective
    """Function that the run minimises."""
    pipeline: "Pipeline | None" = None
    """Runs the pipeline stages; None: no pipeline parallelism."""
    adaptive: Adaptive | None = None
    """Adaptive mixture; None: off."""
    outer: "Outer | None" = None
    """Outer optimizer of islands; None: no islands."""
    control: "Control | None" = None
    """Control requests to the running job."""
    guard: StepGuard = field(default_factory=lambda: StepGuard(GuardConfig()))
    """Decides which steps are skipped."""
    early_stop: EarlyStop | None = None
    """Ends the run when its held-out loss no longer falls; None: off."""
    device_hours: DeviceHours | None = None
    """Counts what the run uses of its machines; None: not recorded."""
    watch: StepMonitors = field(default_factory=StepMonitors)
    """Monitors of single steps."""
    resumed_numerics: int = NUMERICS
    """`NUMERICS` of the code that trained the checkpoint that the run resumed from."""
    kernels: KernelTable = field(default_factory=KernelTable)
    """Kernels of the run's operations."""
    resumed_kernels: KernelTable = field(default_factory=KernelTable)
    """Those of the checkpoint that the run resumed from; empty: there are none."""
    tasks: "LiveTasks | None" = None
    """Tasks to evaluate during training; None: none."""
    compiled_shapes: set[tuple[int, ...]] = field(default_factory=set)
    """Shapes of batches whose programs were compiled (compile_ahead.py)."""
    dropout_seed: int | None = None
    """Seed of the masks of an adapter's dropout; None: nothing is dropped."""

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.loader.step

    def is_told_to_leave(self) -> bool:
        """True if a request ends the job now: to stop, or to restart with another number of islands."""
        if self.control is not None and self.control.stops:
            return True
        if self.outer is None or self.control is None or self.control.islands is None:
            return False
        return self.outer.has_met or not self.outer.meets_whole

    def exchanges_under_way(self) -> tuple[int, ...]:
        """Return the fragments with an exchange in progress, equal on all ranks; `tensors` includes them."""
        return () if self.outer is None else tuple(sorted(self.outer.in_progress))

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's live tensors for a checkpoint."""
        own = training_tensors(self.model, self.optimizer)
        if self.outer is None:
            return own
        from penstock.train.islands.checkpoint import island_tensors

        return island_tensors(self.outer, own)

    def shown(self) -> AbstractContextManager[None]:
        """Context manager: the model has the run's parameters, not those of this rank's island."""
        return nullcontext() if self.outer is None else self.outer.shown()

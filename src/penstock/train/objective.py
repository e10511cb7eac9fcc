"""Objectives: the functions that runs minimise. One is chosen at set-up, and the training step calls it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxtyping import Float64
from torch import Tensor

from penstock.nn.head import OutputHead
from penstock.obs.sinks import Record
from penstock.parallel.mesh import World

DeviceBatch = dict[str, Any]  # Any: tensors, as the loader delivers them
Finish = Callable[[Tensor, OutputHead], Tensor]
"""Function from hidden states and the output head to a summed loss; see `Llama.forward`."""


class Sums(Protocol):
    """Sums over this rank's share of a step besides its loss, added up over all ranks."""

    def values(self) -> Sequence[Float64[Tensor, "sums"]]:
        """Return the sums, on the device; equally many on every rank."""
        ...


class Objective(Protocol):
    """Loss of a run; it is a mean over something that is counted over all ranks and micro-batches."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that it reads from a batch besides those of every step."""
        ...

    def begin_step(
        self, state: Any, batch: DeviceBatch, world: World, *, rows: int
    ) -> Sums:  # Any: TrainState
        """Prepare the loss of a step's batch; every rank calls it.

        Args:
            rows: rows of a micro-batch.
        """
        ...

    def prepare(self, part: DeviceBatch) -> DeviceBatch:
        """Return the fields of a micro-batch of whole rows as the model needs them."""
        ...

    def count(self, batch: DeviceBatch, columns: slice) -> int:
        """Return the number of terms of the mean in some columns of the batch: labels, or pairs."""
        ...

    def finish(self, part: DeviceBatch, sums: Any) -> Finish:  # Any: what begin_step returned
        """Return the function that computes the summed loss of a micro-batch, and adds to `sums`."""
        ...

    def metrics(self, sums: Sequence[float]) -> Record:
        """Return the objective's metrics of a step from the sums over all ranks."""
        ...

    def validate(self, state: Any, world: World, *, rows: int) -> Record:  # Any: TrainState
        """Return the record of a validation; every rank calls it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSetup:
    """An objective and what the loaders must deliver for it."""

    objective: Objective
    loader_options: dict[str, Any] = field(default_factory=dict)  # Any: arguments of Loader
    """Options of the training loader; empty: those of every run."""
    heldout_options: dict[str, Any] = field(default_factory=dict)
    """Options of the loader of held-out rows."""

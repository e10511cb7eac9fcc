"""Compute one step: the network once over the tokens of all shares, logits where they are needed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from penstock.engine.adapters import Adapters
from penstock.engine.batch import Batch
from penstock.engine.compiled import CompiledSteps
from penstock.engine.kv_cache import BoundCache, PagedCache
from penstock.engine.ranks.group import RankGroup
from penstock.engine.ranks.tensor_parallel import GatheredLogits
from penstock.engine.whole_steps import WholeSteps, whole_steps
from penstock.models.llama.model import Llama

Forward = Callable[[Tensor, Tensor, BoundCache], Tensor]
"""(ids [1, t], positions [1, t], cache) -> normalised residual stream [1, t, hidden]."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a step computed."""

    hidden: Float[Tensor, "t hidden"]
    """Of the tokens that the batch asked for; what is in other rows means nothing."""
    logits: Float[Tensor, "r vocab"]
    """Of the rows that the batch asked for."""


class Runs(Protocol):
    """Computes steps, on one device or many."""

    @property
    def adapters(self) -> Mapping[str, int]:
        """Name of each adapter that a request may ask for -> what a batch calls it."""
        ...

    def run(self, batch: Batch) -> Output:
        """Compute one step.

        Raises:
            RunnerLost: no further step can be computed.
        """
        ...

    def add_adapter(self, name: str, folder: Path) -> None:
        """Open an adapter on all devices; errors as in `Adapters.add`."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter on all devices; errors as in `Adapters.remove`."""
        ...

    def on_lost(self, call: Callable[[], None]) -> None:
        """Set what is called, from another thread, once no further step can be computed."""
        ...

    def check(self) -> None:
        """Raise RunnerLost if no further step can be computed."""
        ...

    def close(self) -> None:
        """Free what is held; once more does nothing."""
        ...


class Runner:
    """The network and its pages in this process.

    Args:
        adapters: of the model; may be empty.
        group: the ranks that share each layer, which have met; None: this one has all of it.
        forward: computes the residual stream; None: the network itself.
    """

    def __init__(
        self,
        model: Llama,
        cache: PagedCache,
        adapters: Adapters,
        *,
        group: RankGroup | None = None,
        forward: Forward | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self._adapters = adapters
        self._group = group
        self._project = model.logits if group is None else GatheredLogits(model, group)
        self.forward: Forward = forward or self._plain
        self._compiled: CompiledSteps | None = None
        self._is_plain = forward is None
        self._whole: WholeSteps | None = None
        self._is_settled = False  # whether it is known that there is a `_whole`, or none

    @property
    def adapters(self) -> Mapping[str, int]:
        """Name of each adapter -> what a batch calls it."""
        return self._adapters.indexes

    @torch.inference_mode()
    def run(self, batch: Batch) -> Output:
        """Compute one step; keys and values of its tokens are in the pages afterwards."""
        whole = self._whole_now()
        if whole is not None and whole.takes(batch):
            return Output(*whole.run(batch))
        ids, positions, rows = (
            torch.from_numpy(array).to(self.cache.device, non_blocking=True)
            for array in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        self._adapters.begin(batch)
        hidden = self.forward(ids[None], positions[None], self.cache.bind(batch))[0]
        return Output(hidden, self._project(hidden[rows]))

    def add_adapter(self, name: str, folder: Path) -> None:
        """Open an adapter; errors as in `Adapters.add`."""
        self._adapters.add(name, folder)
        if self._whole is not None:
            self._whole.hold(*self._adapters.held(name))

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; errors as in `Adapters.remove`."""
        index = self._adapters.remove(name)
        if self._whole is not None:
            self._whole.release(index)

    def on_lost(self, call: Callable[[], None]) -> None:
        """Nothing can be lost that this process would survive."""

    def check(self) -> None:
        """The next step can be computed."""

    def compile(self, *, max_sequences: int, max_tokens: int, max_blocks: int) -> None:
        """Begin to compile steps beside the plain ones; sizes as in `CompiledSteps`."""
        self._compiled = CompiledSteps(
            self.model,
            self.cache,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            max_blocks=max_blocks,
            is_plain=lambda: not self._adapters.indexes,
        )
        self.forward = self._compiled
        self._is_plain, self._is_settled = False, False
        self._compiled.start()

    def close(self) -> None:
        """End the compiler, after the program it is at; the memory goes with the object."""
        if self._compiled is not None:
            self._compiled.close()

    def _whole_now(self) -> WholeSteps | None:
        if not self._is_settled:
            self._whole = whole_steps(self.model, self.cache, self._group) if self._is_plain else None
            self._is_settled = True
            if self._whole is not None:
                for name in self._adapters.indexes:
                    self._whole.hold(*self._adapters.held(name))
        return self._whole

    def _plain(self, ids: Tensor, positions: Tensor, cache: BoundCache) -> Tensor:
        return self.model.hidden(ids, position_ids=positions, cache=cache)

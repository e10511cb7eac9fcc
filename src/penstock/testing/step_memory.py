"""Peak tensor memory of a real training step, measured on any device.

Exact where the size of a process is not: memory kept by the allocator, other threads and libraries is not
counted. Allocations inside an operator are not visible.
"""

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.data import Loader
from penstock.parallel.mesh import World
from penstock.train.recipe.config import TrainConfig
from penstock.train.setup import open_state
from penstock.train.state import TrainState
from penstock.train.step import ControlFlags, train_step

_STEPS = 2  # the first step allocates buffers that stay


def peak_of_step(
    config: TrainConfig, world: World, *, prepare: Callable[[TrainState], None] = lambda _: None
) -> int:
    """Train two steps from the start; return the peak bytes of the second. Every rank must call it.

    Counts everything allocated since the start: weights, optimizer state, tensors of a step; not the
    temporaries inside an operator.
    """
    with LiveBytes() as seen:
        state = open_state(config, world)
        assert isinstance(state.loader, Loader)
        prepare(state)
        batches = iter(state.loader)
        for _ in range(_STEPS):
            batch = next(batches)
            seen.reset()
            rows = config.data.micro_batch_size or len(batch["labels"])
            train_step(
                state,
                batch,
                world,
                micro_batch_size=rows,
                clip_norm=config.optim.clip_norm,
                asked=ControlFlags(False),
            )
        return seen.peak


class LiveBytes(TorchDispatchMode):
    """Tracks the storages that operators return, from entry to exit; also those that FSDP frees and refills.

    >>> with LiveBytes() as seen:
    ...     kept = torch.zeros(1000) + torch.zeros(1000)
    >>> seen.peak, seen.largest, seen.now
    (12000, 4000, 4000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Live bytes, of storages made since entry."""
        self.peak = 0
        """Peak of live bytes since entry or `reset`."""
        self.largest = 0
        """Bytes of the largest storage."""
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def reset(self) -> None:
        """Reset the peak."""
        self._measure()
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: whatever the operator takes and returns
        before = {_storage(t)._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and not tensor.is_meta
                and _storage(tensor)._cdata not in before | self._known.keys()
            ):
                self._watch(_storage(tensor))
        self._measure()
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._known[key] = weakref.ref(storage), 0
        weakref.finalize(storage, self._gone, key)

    def _measure(self) -> None:
        """Measure every storage: resizing one is not an operator."""
        for key, (known, size) in list(self._known.items()):
            storage = known()
            if storage is not None and (new := storage.nbytes()) != size:
                self._known[key] = known, new
                self.now += new - size
                self.largest = max(self.largest, new)
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        _, size = self._known.pop(key)
        self.now -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of this rank's part: that of a DTensor itself has no meaningful size."""
    held: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return held.untyped_storage()

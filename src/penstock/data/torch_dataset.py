"""Torch datasets over the loader: samples by number, or whole batches through DataLoader workers.

For code that requires a DataLoader. The loader's own iterator needs no worker processes and is faster:
reading a batch costs less than passing it between processes. Of n workers, worker w computes steps w, w + n,
..., and DataLoader returns batches in that order, so the stream is the same for any number of workers, forked
or spawned. Every process opens its own copy of the loader; later changes of the loader (weights, skips) take
effect at the next `iter()` of the DataLoader.

Lightning reads one batch ahead of an iterable without a length, to know which is the last, and a state saved
then would be one batch too far. `SizedBatches` has a length to avoid this.
"""

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock.core.errors import ConfigError, StateMismatch, UsageError
from penstock.data.state import State
from penstock.data.types import Batch

if TYPE_CHECKING:
    from penstock.data.loader import Loader


Tensors = dict[str, torch.Tensor]

_MARK = "penstock_stream"


def map_style(loader: "Loader") -> "Samples":
    """Return the loader's samples as a map-style dataset: `dataset[k]` is global sample k."""
    return Samples(loader)


def stream(loader: "Loader", steps: int | None = None) -> "Batches":
    """Return the loader's batches as an iterable dataset, for `DataLoader(..., batch_size=None)`.

    Each `iter()` of the DataLoader starts at the loader's state and never advances the loader. Under
    torchdata's StatefulDataLoader a saved state resumes exactly with the same number of workers; to resume
    with another number, pass its `loader_state` to the loader. Under a plain DataLoader the state after n
    batches is `state_after(n)`.

    Args:
        steps: number of batches; None: endless.
    """
    return Batches(loader, steps)


class Samples(Dataset[Tensors]):
    """Map-style dataset of global samples, for custom samplers.

    The length is the loader's `num_samples` if a corpus has a cap on its epochs; else the number of samples,
    at the present weights, until the first corpus has completed one epoch. Samples beyond the length can be
    read too, up to the caps.
    """

    def __init__(self, loader: "Loader") -> None:
        self._loader, self._owner = loader, os.getpid()

    def __len__(self) -> int:
        if (capped := self._loader.num_samples) is not None:
            return capped
        epochs, shares = self._loader.samples_per_epoch, self._loader.weights
        return min(int(epochs[name] / share) for name, share in shares.items() if share)

    def __getitem__(self, sample: int) -> Tensors:
        """Return one sample: 1-d tensors of the loader's fields, and its `sample_ids` [1].

        Raises:
            IndexError: a negative number.
        """
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[Tensors]:
        """Return several samples, read together; DataLoader calls this for a batch."""
        if min(samples) < 0:
            raise IndexError(f"samples are numbered from 0 (got {min(samples)})")
        batch = self._own().gather(np.array(samples, dtype=np.int64))
        tensors = {name: torch.as_tensor(field) for name, field in batch.items()}
        ends = tensors.pop("cu_seqlens", None)
        rows = [{name: field[row] for name, field in tensors.items()} for row in range(len(samples))]
        for row, sample in enumerate(rows):
            sample["sample_ids"] = sample["sample_ids"].reshape(1)
            if ends is not None:
                length = next(field.shape[0] for name, field in sample.items() if name != "sample_ids")
                inside = ends[(ends >= row * length) & (ends <= (row + 1) * length)]
                sample["cu_seqlens"] = inside - row * length
        return rows

    def _own(self) -> "Loader":
        """Return this process's loader; a forked copy could hold a lock of a thread that is gone."""
        if os.getpid() != self._owner:
            self._loader, self._owner = copy(self._loader), os.getpid()
        return self._loader


class Batches(IterableDataset[Tensors]):
    """Iterable dataset of whole batches; see `stream`."""

    def __init__(self, loader: "Loader", steps: int | None) -> None:
        self._loader = loader
        self._steps = steps

    def __iter__(self) -> "_Turns":
        return _Turns(copy(self._loader), self._steps)

    def state_after(self, batches: int) -> State:
        """Return the loader's state after `batches` batches of a DataLoader's iterator."""
        if batches < 0:
            raise UsageError("batches must be zero or more", got=batches)
        return self._loader.state_at(self._loader.step + batches)

    def loader_state(self, saved: dict[str, Any]) -> State:  # Any: torchdata's nested state
        """Return the loader's state for the state of a StatefulDataLoader.

        Raises:
            StateMismatch: it is not the state of a stream.
        """
        turns = list(_marked(saved))
        if not turns:
            raise StateMismatch(
                "The state contains no stream of this loader",
                fix="Give the state_dict() of the StatefulDataLoader over this dataset.",
            )
        loader = copy(self._loader)
        loader.load_state_dict(turns[0]["loader"])
        # Each worker is at its own next step; batches after the last snapshot are counted separately.
        step = min(turn["next"] for turn in turns) + saved.get("_steps_since_snapshot", 0)
        return loader.state_at(step)


class _Turns(Iterator[Tensors]):
    """Iterator over one worker's steps; StatefulDataLoader saves its state."""

    def __init__(self, loader: "Loader", steps: int | None) -> None:
        info = get_worker_info()
        worker, self._workers = (info.id, info.num_workers) if info else (0, 1)
        self._loader, self._start = loader, loader.state_dict()
        self._next = loader.step + worker
        self._stop = None if steps is None else loader.step + steps

    def __next__(self) -> Tensors:
        if self._stop is not None and self._next >= self._stop:
            raise StopIteration
        batch = self._loader.batch_at(self._next)
        self._next += self._workers
        return {name: torch.as_tensor(field) for name, field in batch.items()}

    def state_dict(self) -> dict[str, Any]:  # Any: JSON values
        return {
            _MARK: 1,
            "next": self._next,
            "stop": self._stop,
            "workers": self._workers,
            "loader": self._start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("workers") != self._workers:
            raise StateMismatch(
                f"The stream was saved with {state.get('workers')} workers, this one has {self._workers}",
                fix="Use the same number; or load the loader with stream(loader).loader_state(saved), "
                "then make a new DataLoader.",
            )
        self._loader.load_state_dict(state["loader"])
        self._start, self._next, self._stop = state["loader"], state["next"], state["stop"]


def _marked(state: object) -> Iterator[dict[str, Any]]:
    """Yield the states of streams nested in another state."""
    if isinstance(state, dict):
        if _MARK in state:
            yield state
            return
        state = list(state.values())
    if isinstance(state, list | tuple):
        for inner in state:
            yield from _marked(inner)


class SizedBatches:
    """Batches of a loader from its present step up to step `steps`, counted from the start of the run.

    The length is that of the whole run, `steps`, so a framework that resumes knows the progress. State is
    read from and written to the loader.

    Raises:
        ConfigError: fewer than one step.
    """

    def __init__(self, loader: "Loader", steps: int) -> None:
        if steps < 1:
            raise ConfigError("steps must be at least 1", got=steps)
        self.loader = loader
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Generator[dict[str, Any]]:  # Any: tensors or arrays, as the loader delivers
        batches = iter(self.loader)
        with closing(batches):
            while self.loader.step < self._steps:
                yield next(batches)

    def state_dict(self) -> State:
        """Return the loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Restore the loader's state."""
        self.loader.load_state_dict(state)


def to_tensors(batch: Batch, *, pin_memory: bool) -> dict[str, torch.Tensor]:
    """Return a batch's fields as CPU tensors of the same shapes and dtypes.

    The tensors share the batch's memory. With `pin_memory` they are copied into page-locked memory,
    from which a copy to a GPU can overlap with compute.
    """
    tensors = {name: torch.from_numpy(np.ascontiguousarray(field)) for name, field in batch.fields.items()}
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin_memory else tensors

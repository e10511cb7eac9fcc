"""The loader as torch datasets: samples by number, or whole batches through DataLoader workers.

For code that insists on a DataLoader. The loader's own iterator needs no worker processes and is faster:
a batch costs less to read than to pass between processes. Workers take turns: of n, worker w computes
steps w, w + n, ..., and DataLoader hands batches over in that order, so the stream is the same for any
number of workers, forked or spawned. Every process opens its own copy of the loader; what the loader is
told later (weights, skips) holds from the next `iter()` of the DataLoader on.
"""

import os
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock.core.errors import StateMismatch, UsageError
from penstock.data.loader import Loader
from penstock.data.state import State

Tensors = dict[str, torch.Tensor]

_MARK = "penstock_stream"


def map_style(loader: Loader) -> "Samples":
    """Return the loader's samples as a map-style dataset: `dataset[k]` is global sample k."""
    return Samples(loader)


def stream(loader: Loader, steps: int | None = None) -> "Batches":
    """Return the loader's batches as an iterable dataset, for `DataLoader(..., batch_size=None)`.

    Each `iter()` of the DataLoader starts at the loader's state; it never moves the loader. Under
    torchdata's StatefulDataLoader a saved state resumes exactly, with the same number of workers; to go
    on with another number, give `loader_state` of it to the loader. Under a plain DataLoader the state
    after n of its batches is `state_after(n)`.

    Args:
        steps: batches until the stream ends; None: it goes on for ever.
    """
    return Batches(loader, steps)


class Samples(Dataset[Tensors]):
    """Global samples by number, for samplers of one's own.

    The length is the loader's `num_samples` where a corpus has a cap on its epochs; else as many samples
    as it takes, at the present weights, until the first corpus has been passed over once: for a single
    corpus one epoch. Numbers beyond the length are served too, as far as the corpora go.
    """

    def __init__(self, loader: Loader) -> None:
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
        """Return several samples, read in one go; DataLoader asks for batches this way."""
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

    def _own(self) -> Loader:
        """Return this process's loader: a forked one may hold a lock of a thread that is not there."""
        if os.getpid() != self._owner:
            self._loader, self._owner = copy(self._loader), os.getpid()
        return self._loader


class Batches(IterableDataset[Tensors]):
    """A stream of whole batches; see `stream`."""

    def __init__(self, loader: Loader, steps: int | None) -> None:
        self._loader = loader
        self._steps = steps

    def __iter__(self) -> "_Turns":
        return _Turns(copy(self._loader), self._steps)

    def state_after(self, batches: int) -> State:
        """Return the loader's state after so many batches of a DataLoader's iterator."""
        if batches < 0:
            raise UsageError("batches must be zero or more", got=batches)
        return self._loader.state_at(self._loader.step + batches)

    def loader_state(self, saved: dict[str, Any]) -> State:  # Any: torchdata's nested state
        """Return the loader's state that a StatefulDataLoader's state amounts to.

        Raises:
            StateMismatch: it is not the state of a stream.
        """
        turns = list(_marked(saved))
        if not turns:
            raise StateMismatch(
                "The state holds no stream of this loader",
                fix="Give the state_dict() of the StatefulDataLoader over this dataset.",
            )
        loader = copy(self._loader)
        loader.load_state_dict(turns[0]["loader"])
        # Workers stand at their next turns; those behind the last snapshot are counted apart.
        step = min(turn["next"] for turn in turns) + saved.get("_steps_since_snapshot", 0)
        return loader.state_at(step)


class _Turns(Iterator[Tensors]):
    """The steps of one worker; its state is what StatefulDataLoader saves."""

    def __init__(self, loader: Loader, steps: int | None) -> None:
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
                fix="Use as many; or load the loader with stream(loader).loader_state(saved) and start a new "
                "DataLoader.",
            )
        self._loader.load_state_dict(state["loader"])
        self._start, self._next, self._stop = state["loader"], state["next"], state["stop"]


def _marked(state: object) -> Iterator[dict[str, Any]]:
    """Find the states of streams inside another's."""
    if isinstance(state, dict):
        if _MARK in state:
            yield state
            return
        state = list(state.values())
    if isinstance(state, list | tuple):
        for inner in state:
            yield from _marked(inner)

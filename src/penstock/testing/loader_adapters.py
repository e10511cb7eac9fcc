"""Adapters of the conformance kit: for Penstock's loader, and for any iterable with a `state_dict`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.data.loader import Loader


@dataclass(slots=True)
class _Opened:
    """Loader and its only iterator."""

    loader: Any  # Any: depends on the adapter
    batches: Iterator[Any]


class PenstockAdapter:
    """Penstock's loader over one corpus; token 0 is padding (`numbered_corpus` does not contain it).

    Args:
        corpora: name -> folder, exactly one.
        options: of Loader.
    """

    def __init__(self, corpora: Mapping[str, str | Path], **options: Any) -> None:
        (self._name,) = corpora
        self._corpora, self._options = dict(corpora), options

    def open(
        self, rank: int, world_size: int, num_workers: int, states: Sequence[Any] | None = None
    ) -> _Opened:
        """Open one rank; the state of any rank serves all ranks."""
        loader = Loader(
            self._corpora,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            **{"fields": ("input_ids",), **self._options, "deliver": "numpy"},
        )
        if states:
            loader.load_state_dict(states[0])
        return _Opened(loader, iter(loader))

    def next(self, opened: _Opened) -> npt.ArrayLike:
        """Return the tokens of the next batch that belong to the first epoch."""
        batch = next(opened.batches)
        in_epoch = batch["sample_ids"] < opened.loader.samples_per_epoch[self._name]
        if not in_epoch.any():
            raise StopIteration
        tokens = batch["input_ids"][in_epoch]
        return np.array(tokens[tokens != 0], dtype=np.int64)

    def save(self, opened: _Opened) -> Any:
        """Return the loader's state."""
        return opened.loader.state_dict()

    def close(self, opened: _Opened) -> None:
        """End the loader's threads."""
        opened.batches.close()  # type: ignore[attr-defined]  # a generator


class Stateful(Protocol):
    """Iterable with a state: torchdata's StatefulDataLoader, torchtitan's loaders, and so on."""

    def __iter__(self) -> Iterator[Any]:
        """Start, or continue from the loaded state."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a state."""


class StatefulAdapter:
    """Any stateful iterable; on another number of ranks, rank r loads the state of rank r modulo the old one.

    This is the usual workaround for loaders that do not support another number of ranks.

    Args:
        make: (rank, world_size, num_workers) -> a new loader of one pass.
        tokens_of: batch -> identities of its tokens.
    """

    def __init__(
        self, make: Callable[[int, int, int], Stateful], tokens_of: Callable[[Any], npt.ArrayLike]
    ) -> None:
        self._make, self._tokens_of = make, tokens_of

    def open(
        self, rank: int, world_size: int, num_workers: int, states: Sequence[Any] | None = None
    ) -> _Opened:
        """Make a loader, load a state, and only then iterate, as torchdata requires."""
        loader = self._make(rank, world_size, num_workers)
        if states:
            loader.load_state_dict(states[rank % len(states)])
        return _Opened(loader, iter(loader))

    def next(self, opened: _Opened) -> npt.ArrayLike:
        """Return the tokens of the next batch."""
        return self._tokens_of(next(opened.batches))

    def save(self, opened: _Opened) -> Any:
        """Return the loader's state."""
        return opened.loader.state_dict()

    def close(self, opened: _Opened) -> None:
        """Drop the iterator, which ends its workers."""
        opened.loader = None
        opened.batches = iter(())

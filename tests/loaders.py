"""What tests of the loader do with it, over and over."""

import json
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from penstock.data import Loader

Make = Callable[..., Loader]
WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2])


def ids(batch: dict[str, Any]) -> list[int]:
    return batch["sample_ids"].tolist()  # type: ignore[no-any-return]


def take(loader: Loader, steps: int) -> list[list[int]]:
    """Take batches with an iterator of their own; return their sample ids."""
    batches = iter(loader)
    found = [ids(batch) for batch in islice(batches, steps)]
    batches.close()
    return found


def steps(first: int, past: int, *, size: int = 4) -> list[list[int]]:
    return [list(range(step * size, (step + 1) * size)) for step in range(first, past)]


def penstock_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def run(loader: Loader, steps: int) -> Loader:
    """Take batches and drop them; return the loader."""
    take(loader, steps)
    return loader


def resumed(loader: Loader, other: Loader) -> Loader:
    """Move another loader to a loader's state, by way of a file."""
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return other


def tokens(loader: Loader, steps: range) -> list[list[list[int]]]:
    return [loader.batch_at(step)["input_ids"].tolist() for step in steps]

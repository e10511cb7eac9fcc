"""Rank runner: run a function on several real gloo ranks, of this machine or of emulated hosts."""

import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from penstock.launch.local import JobOutcome, run
from penstock.netlab.hosts import Hosts
from penstock.parallel.apply import import_sharing
from penstock.parallel.mesh import World, join


def _import_training() -> None:
    """Import what a run imports when it first needs it: here once, and not in each rank (0.05 s)."""
    import numpy.ma  # noqa: F401 - by `np.unique`

    import penstock.checkpoint.local_storage
    import penstock.data.torch_dataset
    import penstock.parallel.context
    import penstock.parallel.ethernet.quantized_gather
    import penstock.parallel.pipeline
    import penstock.parallel.vocab_parallel
    import penstock.train.tune.choose  # noqa: F401

    import_sharing()


_import_training()

T = TypeVar("T")
Start = Callable[[Callable[[], int], Callable[[BaseException], tuple[str, int]]], JobOutcome]


def on_ranks(work: Callable[[World], T], *, ranks: int) -> list[T]:
    """Call `work(world)` in `ranks` forked processes, one thread each; return the results by rank.

    Raises:
        AssertionError: a rank failed; the message contains its error.
    """
    return _collect(work, partial(run, processes=ranks))


def on_hosts(work: Callable[[World], T], hosts: Hosts, *, processes_per_host: int = 1) -> list[T]:
    """Call `work(world)` in processes on every host of a lab, as `on_ranks` does."""
    return _collect(work, partial(hosts.run, processes_per_host=processes_per_host))


def _collect(work: Callable[[World], T], start: Start) -> list[T]:
    with tempfile.TemporaryDirectory() as folder:

        def one_rank() -> int:
            with join() as world:
                torch.set_num_threads(1)  # the parent's thread pool does not survive a fork
                result = work(world)
            (Path(folder) / str(world.ranks.rank)).write_bytes(pickle.dumps(result))
            return 0

        outcome = start(one_rank, lambda error: (f"{type(error).__name__}: {error}", 1))
        assert outcome.code == 0, outcome
        files = sorted(Path(folder).iterdir(), key=lambda file: int(file.name))
        return [pickle.loads(file.read_bytes()) for file in files]

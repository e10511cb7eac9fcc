"""Run a function on several real gloo ranks of this machine and collect what each returns."""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from penstock.launch.local import run
from penstock.parallel.mesh import World, join

T = TypeVar("T")


def on_ranks(work: Callable[[World], T], *, ranks: int) -> list[T]:
    """Call `work(world)` in `ranks` forked processes, one thread each; return the results by rank.

    Raises:
        AssertionError: a rank failed; the message has what it said.
    """
    with tempfile.TemporaryDirectory() as folder:

        def one_rank() -> int:
            with join() as world:
                torch.set_num_threads(1)  # the parent's thread pool does not survive a fork
                result = work(world)
            (Path(folder) / str(world.ranks.rank)).write_bytes(pickle.dumps(result))
            return 0

        outcome = run(one_rank, lambda error: (f"{type(error).__name__}: {error}", 1), processes=ranks)
        assert outcome.code == 0, outcome
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]

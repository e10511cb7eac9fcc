"""The only place that reads environment variables and the machine's size."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who this process is, as torchrun and `penstock train --processes` say it."""

    rank: int
    """Index of this process among all, in [0, world_size)."""
    world_size: int
    """Number of processes of the run."""
    local_rank: int
    """Index of this process on its machine; selects the device."""


def ranks() -> Ranks:
    """Read RANK, WORLD_SIZE and LOCAL_RANK; one process where they are not set."""
    return Ranks(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


def local_world_size() -> int:
    """Number of processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


RENDEZVOUS = "PENSTOCK_RENDEZVOUS"
"""File URL through which the processes that Penstock's launcher starts find each other."""


def rendezvous() -> str:
    """Where the processes of a run meet: a file, or MASTER_ADDR and MASTER_PORT as torchrun sets them."""
    return os.environ.get(RENDEZVOUS, "env://")


def num_cores() -> int:
    """Cores this process may use (its affinity mask, not the machine's total)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

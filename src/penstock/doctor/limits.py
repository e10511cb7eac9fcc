"""Check: what the system allows a process: open files, locked and shared memory, memory of its group."""

import math
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.core.units import mib
from penstock.doctor.check import Asked
from penstock.doctor.finding import Finding, green, red, yellow
from penstock.doctor.machine import number_of
from penstock.launch.probe import probe_nics

CHECK = "limits"

_LEAST_FILES = 4096
"""A rank holds a descriptor or two for each peer, and those of its shards."""
_LEAST_SHARED = 2**30
"""NCCL takes some 10 MiB a pair of local devices from /dev/shm; containers start with 64 MiB."""
_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Bounds on this process."""

    open_files: float
    """inf: none."""
    locked_bytes: float
    """inf: none."""
    shared_bytes: int | None
    """Free in /dev/shm; None: the system has none."""
    memory_bytes: int
    """Of the machine, or what the control group allows of it."""
    num_devices: int
    has_rdma: bool


def measure(_asked: Asked) -> Facts:
    """Ask the system."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Facts(
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_bytes=_soft(getattr(resource, "RLIMIT_MEMLOCK", resource.RLIMIT_NOFILE)),
        shared_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        memory_bytes=min(number_of(_GROUP / "memory.max") or machine, machine),
        num_devices=torch.cuda.device_count(),
        has_rdma=any(nic.rdma_devices for nic in probe_nics()),
    )


def _soft(kind: int) -> float:
    soft, _ = resource.getrlimit(kind)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def judge(facts: Facts) -> Iterator[Finding]:
    """Hold the bounds against what a run takes."""
    found = [*_files(facts), *_locked(facts), *_shared(facts)]
    yield from found
    if not found:
        yield green(
            CHECK,
            f"{mib(facts.memory_bytes)} of memory, /dev/shm {mib(facts.shared_bytes or 0)} free, "
            f"{facts.open_files:,.0f} open files",
        )


def _files(facts: Facts) -> Iterator[Finding]:
    if facts.open_files < _LEAST_FILES:
        yield yellow(
            CHECK,
            f"A process may open {facts.open_files:,.0f} files",
            remedy="ulimit -n 65536, or LimitNOFILE= of the service.",
        )


def _locked(facts: Facts) -> Iterator[Finding]:
    if facts.has_rdma and facts.locked_bytes != math.inf:
        yield red(
            CHECK,
            f"A process may lock {mib(facts.locked_bytes)} of memory, and RDMA locks its buffers",
            remedy="ulimit -l unlimited, or LimitMEMLOCK=infinity; docker run --ulimit memlock=-1.",
        )


def _shared(facts: Facts) -> Iterator[Finding]:
    if facts.shared_bytes is not None and facts.shared_bytes < _LEAST_SHARED:
        level = red if facts.num_devices > 1 else yellow
        yield level(
            CHECK,
            f"/dev/shm has {mib(facts.shared_bytes)} free; the devices of a machine talk through it",
            remedy="mount -o remount,size=16G /dev/shm; docker run --shm-size=16g or --ipc=host.",
        )

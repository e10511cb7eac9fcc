"""Check: limits of a process: open files, locked and shared memory, memory of its control group."""

import math
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.core.network.probe import probe_nics
from penstock.core.units import mib
from penstock.devices import accelerator
from penstock.doctor.checks.check import CheckOptions, Finding, green, red, yellow
from penstock.doctor.checks.proc_files import number_of

CHECK = "limits"

_MIN_FILES = 4096
"""Minimum of open files: a rank has one or two descriptors per peer, and those of its shards."""
_MIN_SHARED = 2**30
"""Minimum of /dev/shm: NCCL uses some 10 MiB per pair of local devices; containers start with 64 MiB."""
_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class UlimitFacts:
    """Limits of this process."""

    open_files: float
    """inf: unlimited."""
    locked_bytes: float
    """inf: unlimited."""
    shared_bytes: int | None
    """Free bytes in /dev/shm; None: there is none."""
    memory_bytes: int
    """Memory of the machine, or of the control group if lower."""
    num_devices: int
    has_rdma: bool


def measure(_options: CheckOptions) -> UlimitFacts:
    """Query the system."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return UlimitFacts(
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_bytes=_soft(getattr(resource, "RLIMIT_MEMLOCK", resource.RLIMIT_NOFILE)),
        shared_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        memory_bytes=min(number_of(_GROUP / "memory.max") or machine, machine),
        num_devices=accelerator.count(),
        has_rdma=any(nic.rdma_devices for nic in probe_nics()),
    )


def _soft(kind: int) -> float:
    soft, _ = resource.getrlimit(kind)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def judge(facts: UlimitFacts) -> Iterator[Finding]:
    """Compare the limits with the needs of a run."""
    found = [*_files(facts), *_locked(facts), *_shared(facts)]
    yield from found
    if not found:
        yield green(
            f"{mib(facts.memory_bytes)} of memory, /dev/shm {mib(facts.shared_bytes or 0)} free, "
            f"{facts.open_files:,.0f} open files"
        )


def _files(facts: UlimitFacts) -> Iterator[Finding]:
    if facts.open_files < _MIN_FILES:
        yield yellow(
            f"A process may open {facts.open_files:,.0f} files",
            remedy="ulimit -n 65536, or LimitNOFILE= of the service.",
        )


def _locked(facts: UlimitFacts) -> Iterator[Finding]:
    if facts.has_rdma and facts.locked_bytes != math.inf:
        yield red(
            f"A process may lock {mib(facts.locked_bytes)} of memory, and RDMA locks its buffers",
            remedy="ulimit -l unlimited, or LimitMEMLOCK=infinity; docker run --ulimit memlock=-1.",
        )


def _shared(facts: UlimitFacts) -> Iterator[Finding]:
    if facts.shared_bytes is not None and facts.shared_bytes < _MIN_SHARED:
        level = red if facts.num_devices > 1 else yellow
        yield level(
            f"/dev/shm has {mib(facts.shared_bytes)} free; the devices of a machine talk through it",
            remedy="mount -o remount,size=16G /dev/shm; docker run --shm-size=16g or --ipc=host.",
        )

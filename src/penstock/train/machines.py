"""The machines of a run as the planner knows them: asked of torch, the kernel and the environment.

All machines are taken for equal to that of the rank that asks.
"""

from dataclasses import replace

import torch

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.launch.nics import usable
from penstock.launch.probe import probe_nics
from penstock.obs.peak import peak_flops
from penstock.plan.hardware import DEVICES, Cluster, Device, device_named
from penstock.plan.job import Compute

_GIB, _TERA = 2**30, 1e12
_ASSUMED_MBIT_S = 10_000
"""Of a network card that does not say its speed, as those of virtual machines do not."""


def machines_of(*, world_size: int, compute: Compute) -> Cluster:
    """Return the cluster that so many ranks run on.

    Raises:
        ConfigError: the planner has no figures of its GPUs.
    """
    here = ranks_of_machine(world_size)
    nics = usable(probe_nics())
    speeds = [nic.speed_mbit_s for nic in nics if nic.has_true_speed and nic.speed_mbit_s]
    return Cluster(
        name="the machines of this run",
        nodes=world_size // here,
        devices_per_node=here,
        device=_gpu() if torch.cuda.is_available() else _cpu(ranks=here, compute=compute),
        nics=max(1, len(nics)),
        nic_gbit_s=min(speeds, default=_ASSUMED_MBIT_S) / 1000,
    )


def ranks_of_machine(world_size: int) -> int:
    """Return how many of a run's ranks each machine has."""
    here = env.local_world_size() if env.ranks().world_size > 1 else world_size
    return here if world_size % here == 0 else 1


def known_device(name: str, *, memory_gib: float) -> Device:
    """Return what the planner knows of a GPU, with the memory that it has.

    Args:
        name: as its driver gives it.

    Raises:
        ConfigError: nothing.
    """
    known = device_named(name, memory_gib=memory_gib)
    if known is None:
        raise ConfigError(
            "The planner has no figures of this GPU",
            got=f"{name}, {memory_gib:.0f} GiB",
            fix="Describe it under [device] in a cluster.toml, and set plan to the file's path.",
        )
    return replace(known, memory_gib=memory_gib)


def _gpu() -> Device:
    found = torch.cuda.get_device_properties(torch.device("cuda", env.ranks().local_rank))
    return known_device(found.name, memory_gib=found.total_memory / _GIB)


def _cpu(*, ranks: int, compute: Compute) -> Device:
    """Return one rank's share of this machine; how fast it multiplies is measured, in well under a second."""
    tflops = peak_flops(torch.device("cpu"), getattr(torch, compute)) / _TERA
    share = env.memory_bytes() / ranks / _GIB
    return replace(DEVICES["CPU"], memory_gib=share, float32_tflops=tflops, bfloat16_tflops=tflops)

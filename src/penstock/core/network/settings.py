"""Network settings of gloo and NCCL for a machine's interfaces, each with its reason; nothing is set here.

NCCL's variables are defined in its user guide ("Environment Variables"). One TCP stream uses one core on each
side and reaches some 10 Gbit/s: a faster network needs several streams.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.network.nics import Nic, usable

_MBIT_S_OF_A_STREAM = 10_000
_MAX_THREADS = 4
"""Maximum of NCCL_SOCKET_NTHREADS, which costs cores; NCCL's guide recommends 4 for 100 Gbit/s."""
_MAX_SOCKETS = 8
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name interfaces."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Environment variable with its value and the reason."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}  # {self.reason}"


def gloo_settings(nics: Sequence[Nic]) -> list[Setting]:
    """Return gloo's variables for the interfaces of one machine; none if no interface is usable.

    >>> eth0 = Nic(name="eth0", is_up=True, mtu=1500, addresses=("10.0.0.2/24",))
    >>> [str(setting) for setting in gloo_settings([eth0])]
    ['GLOO_SOCKET_IFNAME=eth0  # the one interface that leads to other machines']
    """
    chosen = usable(nics)
    return [Setting("GLOO_SOCKET_IFNAME", _names(chosen), _why(chosen))] if chosen else []


def nccl_settings(nics: Sequence[Nic]) -> list[Setting]:
    """Return NCCL's variables for the interfaces of one machine; none if no interface is usable."""
    chosen = usable(nics)
    if not chosen:
        return []
    rdma = [device for nic in chosen for device in nic.rdma_devices]
    settings = [Setting("NCCL_SOCKET_IFNAME", f"={_names(chosen)}", _why(chosen))]
    if rdma:
        return [
            *settings,
            Setting("NCCL_IB_HCA", f"={','.join(rdma)}", "RDMA devices of those interfaces"),
        ]
    settings.append(Setting("NCCL_IB_DISABLE", "1", "no interface has RDMA: do not look for it"))
    return settings + _streams(chosen) + _channels(chosen)


def interfaces_in(value: str) -> set[str]:
    """Return the interfaces that one of INTERFACE_VARIABLES names.

    >>> sorted(interfaces_in("=net1,net2"))
    ['net1', 'net2']
    """
    return set(value.removeprefix("=").split(","))


def _streams(chosen: Sequence[Nic]) -> list[Setting]:
    """Return the threads and sockets needed to use the fastest interface fully."""
    speed = max((nic.speed_mbit_s or 0 for nic in chosen if nic.has_true_speed), default=0)
    streams = math.ceil(speed / _MBIT_S_OF_A_STREAM)
    if streams <= 1:
        return []
    threads = min(_MAX_THREADS, 2 ** round(math.log2(streams) / 2))
    sockets = min(_MAX_SOCKETS, math.ceil(streams / threads))
    reason = f"{speed / 1000:g} Gbit/s is more than one TCP stream carries: {threads} x {sockets} streams"
    return [
        Setting("NCCL_SOCKET_NTHREADS", str(threads), reason),
        Setting("NCCL_NSOCKS_PERTHREAD", str(sockets), "the same"),
    ]


def _channels(chosen: Sequence[Nic]) -> list[Setting]:
    """Return the settings that use several interfaces at once: a channel uses one."""
    if len(chosen) == 1:
        return []
    settings = [
        Setting(
            "NCCL_MIN_NCHANNELS",
            str(2 * len(chosen)),
            f"a channel uses one interface: two for each of {len(chosen)}",
        )
    ]
    if len({network for nic in chosen for network in nic.networks}) > 1:
        reason = "the interfaces are in networks of their own: a ring stays in one"
        settings.append(Setting("NCCL_CROSS_NIC", "0", reason))
    return settings


def _names(chosen: Sequence[Nic]) -> str:
    return ",".join(nic.name for nic in chosen)


def _why(chosen: Sequence[Nic]) -> str:
    if len(chosen) == 1:
        return "the one interface that leads to other machines"
    return f"the {len(chosen)} interfaces that lead to other machines"

"""Check: network interfaces that would carry a run."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.network.nics import Nic, sharing_a_network, usable
from penstock.core.network.probe import probe_nics
from penstock.doctor.checks.check import CheckOptions, Finding, green, red, yellow

CHECK = "interfaces"

_SLOW_MBIT_S = 10_000
_JUMBO_MTU = 8900
_JUMBO_FROM_MBIT_S = 10_000
"""Speed in Mbit/s from which packets of 1,500 bytes cost a core or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """Network interfaces of a machine."""

    nics: tuple[Nic, ...]
    num_nodes: int


def measure(options: CheckOptions) -> InterfaceFacts:
    """Query the kernel."""
    return InterfaceFacts(nics=tuple(probe_nics()), num_nodes=options.num_nodes)


def judge(facts: InterfaceFacts) -> Iterator[Finding]:
    """Judge which interfaces are usable, and what limits them."""
    chosen = usable(facts.nics)
    if chosen:
        yield green("; ".join(described(nic) for nic in chosen))
    elif facts.num_nodes > 1:
        yield red(
            f"No interface leads to other machines: {_all(facts.nics)}",
            remedy="Bring one up (ip link set NAME up) and give it an address.",
        )
    else:
        yield green("No network; one machine needs none")
    for nic in facts.nics:
        yield from _idle(nic)
    for nic in chosen:
        yield from _held_back(nic)
    shared = sharing_a_network(chosen)
    for nic in chosen:
        if not nic.carries_own_network and not any(nic.name in pair for pair in shared):
            yield red(
                f"Connections to {nic.networks[0]} do not leave by {nic.name}, which is in it",
                remedy=f"gloo and NCCL would use another interface: ip route add {nic.networks[0]} dev "
                f"{nic.name}. In a pod, a CNI plugin has taken the route out of the main table.",
            )
    for first, second, network in shared:
        yield yellow(
            f"{first} and {second} are both in {network}: what leaves may all take one of them",
            remedy="Give each a network of its own, or routes by source address (ip rule).",
        )


def described(nic: Nic) -> str:
    """Return a description of an interface.

    >>> described(Nic(name="eth0", is_up=True, mtu=9000, speed_mbit_s=25_000, driver="ena"))
    'eth0 (ena): 25 Gbit/s, MTU 9000'
    """
    speed = f"{(nic.speed_mbit_s or 0) / 1000:g} Gbit/s" if nic.has_true_speed else "speed unknown"
    parts = [speed, f"MTU {nic.mtu}", *(["default route"] if nic.carries_default_route else [])]
    parts += [f"RDMA {' '.join(nic.rdma_devices)}"] if nic.rdma_devices else []
    if nic.is_virtual_function:
        parts.append("part of a card (SR-IOV)")
    elif nic.num_virtual_functions:
        parts.append(f"SR-IOV up to {nic.num_virtual_functions} parts")
    parts += [] if nic.numa_node is None else [f"NUMA node {nic.numa_node}"]
    return f"{nic.name} ({nic.driver or 'driver unknown'}): {', '.join(parts)}"


def _idle(nic: Nic) -> Iterator[Finding]:
    """Yield a finding for a card that could carry traffic but is down."""
    if nic.bus and not nic.is_up:
        yield yellow(
            f"{nic.name} ({nic.driver}) is down",
            remedy=f"Check its cable and switch port; bring it up: ip link set {nic.name} up.",
        )
    elif nic.networks and not nic.is_up:
        yield red(
            f"{nic.name} has the address {nic.address} and is down",
            remedy=f"Bring it up (ip link set {nic.name} up), or take its address away.",
        )


def _held_back(nic: Nic) -> Iterator[Finding]:
    speed = nic.speed_mbit_s if nic.has_true_speed else None
    if speed is not None and speed < _SLOW_MBIT_S:
        yield yellow(
            f"{nic.name} runs at {speed / 1000:g} Gbit/s",
            remedy="Check that cable and port are for more; what no cable mends: docs/explanation/diloco.md.",
        )
    if speed is not None and speed >= _JUMBO_FROM_MBIT_S and nic.mtu < _JUMBO_MTU:
        yield yellow(
            f"{nic.name} has an MTU of {nic.mtu} at {speed / 1000:g} Gbit/s",
            remedy=f"If every switch between the nodes allows it: ip link set {nic.name} mtu 9000, on all.",
        )


def _all(nics: tuple[Nic, ...]) -> str:
    return ", ".join(f"{nic.name} {'up' if nic.is_up else 'down'}" for nic in nics) or "there is none"

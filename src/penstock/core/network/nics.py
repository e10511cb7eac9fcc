"""Network interfaces of a machine, and the selection of those that carry a job."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_interface

_NOT_A_WAY_OUT = ("bridge", "tun", "tap", "dummy", "ifb", "vxlan")
"""Drivers of container and tunnel interfaces, excluded unless they have the default route (a bridged
card)."""

_NOMINAL = ("veth", "virtio_net", "xen-netfront", "vif")
"""Drivers whose reported speed is fictitious."""

_MUCH_SLOWER = 2
"""Ratio of speeds from which a slower network is assumed to be for management."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """Network interface of this machine, as reported by the kernel."""

    name: str
    is_up: bool
    """True if switched on, with a cable or peer at the other end."""
    mtu: int
    """Largest packet in bytes."""
    speed_mbit_s: int | None = None
    """Speed reported by the driver; None: not reported. See `has_true_speed`."""
    addresses: tuple[str, ...] = ()
    """Addresses with prefix length, such as "10.0.0.2/24"; IPv4 first."""
    carries_default_route: bool = False
    driver: str = ""
    bus: str = ""
    """Bus address of the device, such as "0000:3b:00.0"; empty for software interfaces."""
    numa_node: int | None = None
    rdma_devices: tuple[str, ...] = ()
    """Names of RDMA devices (InfiniBand verbs, RoCE) of the same card."""
    is_virtual_function: bool = False
    """True if it is an SR-IOV virtual function."""
    num_virtual_functions: int = 0
    """Number of SR-IOV virtual functions that this card supports; 0: none."""
    carries_own_network: bool = True
    """True if connections to the network of its first address leave by it. gloo and NCCL choose an interface
    to listen on, and connect from wherever the routes lead."""

    @property
    def has_true_speed(self) -> bool:
        """True if `speed_mbit_s` is that of a cable; virtual interfaces report fictitious speeds."""
        return self.speed_mbit_s is not None and self.driver not in _NOMINAL

    @property
    def networks(self) -> tuple[str, ...]:
        """Networks of its addresses, without link-local ones.

        >>> Nic(name="eth0", is_up=True, mtu=1500, addresses=("10.0.0.2/24", "fe80::1/64")).networks
        ('10.0.0.0/24',)
        """
        return tuple(str(found.network) for found in self._reaching())

    @property
    def address(self) -> str:
        """Address by which others reach it, without prefix length; empty if it has none."""
        return next((str(found.ip) for found in self._reaching()), "")

    def _reaching(self) -> list[IPv4Interface | IPv6Interface]:
        found = [ip_interface(text) for text in self.addresses]
        return [each for each in found if not (each.ip.is_loopback or each.ip.is_link_local)]


def usable(nics: Sequence[Nic]) -> list[Nic]:
    """Return the interfaces that a run's traffic should use, sorted by name.

    They are up, have an address, lead out of the machine, and are not much slower than the fastest. An
    interface of unknown speed is included.


    >>> fast = Nic(name="ens1", is_up=True, mtu=9000, speed_mbit_s=100_000, addresses=("10.0.0.2/24",))
    >>> slow = Nic(name="eno1", is_up=True, mtu=1500, speed_mbit_s=1_000, addresses=("192.168.0.2/24",))
    >>> docker = Nic(name="docker0", is_up=True, mtu=1500, addresses=("172.17.0.1/16",), driver="bridge")
    >>> [nic.name for nic in usable([slow, fast, docker])]
    ['ens1']
    """
    out = [nic for nic in nics if nic.is_up and nic.networks and _leads_out(nic)]
    fastest = max((nic.speed_mbit_s or 0 for nic in out if nic.has_true_speed), default=0)
    kept = [nic for nic in out if not nic.has_true_speed or (nic.speed_mbit_s or 0) * _MUCH_SLOWER >= fastest]
    return sorted(kept, key=lambda nic: nic.name)


def _leads_out(nic: Nic) -> bool:
    return nic.carries_default_route or nic.driver not in _NOT_A_WAY_OUT


def sharing_a_network(nics: Sequence[Nic]) -> list[tuple[str, str, str]]:
    """Return (interface, interface, network) for interfaces in one network: one may carry all traffic.

    >>> a = Nic(name="eth0", is_up=True, mtu=1500, addresses=("10.0.0.2/24",))
    >>> b = Nic(name="eth1", is_up=True, mtu=1500, addresses=("10.0.0.3/24",))
    >>> sharing_a_network([a, b])
    [('eth0', 'eth1', '10.0.0.0/24')]
    """
    return [
        (first.name, second.name, network)
        for index, first in enumerate(nics)
        for second in nics[index + 1 :]
        for network in first.networks
        if network in second.networks
    ]

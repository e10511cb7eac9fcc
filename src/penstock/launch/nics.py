"""What a network interface is, and which of a machine's carry a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_interface

_NOT_A_WAY_OUT = ("bridge", "tun", "tap", "dummy", "ifb", "vxlan")
"""Drivers of what leads to containers and tunnels, unless the default route is there (a bridged card)."""

_NOMINAL = ("veth", "virtio_net", "xen-netfront", "vif")
"""Drivers whose speed, where they say one, is made up."""

_MUCH_SLOWER = 2
"""A network more than so many times slower than the fastest is for managing the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network interface of this machine, as the kernel describes it."""

    name: str
    is_up: bool
    """Switched on, with a cable or peer at the other end."""
    mtu: int
    """Bytes of the largest packet."""
    speed_mbit_s: int | None = None
    """As the driver says; None where it does not. See `has_true_speed`."""
    addresses: tuple[str, ...] = ()
    """With the length of the network's prefix: "10.0.0.2/24". IPv4 first."""
    carries_default_route: bool = False
    driver: str = ""
    bus: str = ""
    """Address of the device, such as "0000:3b:00.0"; empty for what is only software."""
    numa_node: int | None = None
    rdma_devices: tuple[str, ...] = ()
    """Names of RDMA devices (InfiniBand verbs, RoCE) of the same card."""
    is_virtual_function: bool = False
    """Whether it is a part of a card shared by SR-IOV."""
    num_virtual_functions: int = 0
    """How many of such parts this card could be cut into; 0: none."""

    @property
    def has_true_speed(self) -> bool:
        """Whether `speed_mbit_s` is that of a cable; virtual interfaces make theirs up."""
        return self.speed_mbit_s is not None and self.driver not in _NOMINAL

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks its addresses lie in, without those that lead no further than the cable.

        >>> Nic(name="eth0", is_up=True, mtu=1500, addresses=("10.0.0.2/24", "fe80::1/64")).networks
        ('10.0.0.0/24',)
        """
        return tuple(str(found.network) for found in self._reaching())

    @property
    def address(self) -> str:
        """The address by which others reach it, without its prefix; empty where it has none."""
        return next((str(found.ip) for found in self._reaching()), "")

    def _reaching(self) -> list[IPv4Interface | IPv6Interface]:
        found = [ip_interface(text) for text in self.addresses]
        return [each for each in found if not (each.ip.is_loopback or each.ip.is_link_local)]


def usable(nics: Sequence[Nic]) -> list[Nic]:
    """Return the interfaces that a run's traffic should take, in the order of their names.

    They are up, have an address, lead out of the machine, and are not much slower than the fastest. One
    whose speed is unknown is given the benefit of the doubt.

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
    """Return pairs of interfaces in one network, with it: without routes by source, one carries all.

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

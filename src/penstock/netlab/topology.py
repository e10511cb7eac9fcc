"""Topology of an emulated network, the commands that create it, and its ranks' environment; pure.

Every host is a network namespace with NICs eth0, eth1, ...; NIC n of all hosts is connected to one switch,
rail n, with its own subnet. All rails are in one further namespace, so that no interface, address or route of
the machine itself is changed.

A NIC's rate applies in both directions: a token bucket at the host, and one at the switch's port to it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from penstock.core.errors import UsageError

Command = list[str]
"""Arguments of `ip` or `tc`."""

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}
_MIN_RATE = 1e3  # bits per second; `tc` takes integers
_MAX_HOSTS = 200
_MAX_NICS = 16
_MAX_TAPS = 400  # with a latency one process waits for all by `select`, limited to descriptors below 1,024
_MIN_MTU = 576  # every Internet host must accept it; IPv4 need not support less
_MAX_MTU = 65_535
_MIN_BURST = 128 * 1024  # two of TCP's 64 KiB segments, which are then not split
_BURST_S = 0.001
_QUEUE_S = 0.020  # queue of a switch's port, as time at its rate
_MIN_QUEUE = 256 * 1024


def parse_rate(text: str) -> float:
    """Parse a rate in the syntax of `tc`; return bits per second.

    Raises:
        UsageError: it is not a rate, or zero.


    >>> parse_rate("500mbit"), parse_rate("2.5Gbit")
    (500000000.0, 2500000000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.strip().lower())
    rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if rate < _MIN_RATE:
        raise UsageError("Not a rate of a network", got=text, fix="Write one such as 500mbit or 2.5gbit.")
    return rate


def parse_latency(text: str) -> float:
    """Parse a time such as 0.5ms; return seconds.

    Raises:
        UsageError: it is not a time.


    >>> parse_latency("0.5ms"), parse_latency("20us")
    (0.0005, 2e-05)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us)", text.strip().lower())
    if not match:
        raise UsageError("Not a latency", got=text, fix="Write one such as 0.5ms.")
    return float(match[1]) / _PER_SECOND[match[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """NIC of a host, with its cable and switch port."""

    rate: Annotated[str, "RATE"] = ""
    """Rate of a NIC, each way: 200mbit, 2.5gbit. Empty: no limit."""
    mtu: int = 1500
    """Largest packet in bytes, as set on the host."""
    cable: Literal["whole", "unplugged", "deaf"] = "whole"
    """"unplugged": no carrier, visible to the host. "deaf": there is a carrier but nothing arrives."""

    def __post_init__(self) -> None:
        if self.rate:
            parse_rate(self.rate)
        if not _MIN_MTU <= self.mtu <= _MAX_MTU:
            raise UsageError(f"An MTU must be from {_MIN_MTU} to {_MAX_MTU}", got=self.mtu)

    @property
    def bits_per_s(self) -> float:
        """Rate in bits per second; inf if unlimited."""
        return parse_rate(self.rate) if self.rate else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts, their NICs and the network between them."""

    num_hosts: int = 2
    """Number of hosts."""
    num_nics: int = 1
    """Network cards of each host."""
    link: Link = field(default_factory=Link)
    """Properties of the NICs."""
    others: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """NICs that differ, by (host, NIC)."""
    latency_s: float = 0.0
    """One-way latency between hosts in seconds, added to that of the machine."""

    def __post_init__(self) -> None:
        for what, count, most in (("hosts", self.num_hosts, _MAX_HOSTS), ("NICs", self.num_nics, _MAX_NICS)):
            if not 1 <= count <= most:
                raise UsageError(f"The number of {what} must be from 1 to {most}", got=count)
        if self.latency_s < 0:
            raise UsageError("A latency must not be negative", got=self.latency_s)
        if self.latency_s and len(self.places) > _MAX_TAPS:
            raise UsageError(
                f"With a latency there can be {_MAX_TAPS} NICs in all",
                got=len(self.places),
                fix="Ask for fewer hosts or NICs, or for no latency.",
            )
        for place in self.others:
            if place not in self.places:
                raise UsageError("No such (host, NIC)", got=place, fix="Both are counted from 0.")

    @property
    def places(self) -> list[tuple[int, int]]:
        """All (host, NIC) pairs."""
        return [(host, nic) for host in range(self.num_hosts) for nic in range(self.num_nics)]

    def link_of(self, host: int, nic: int) -> Link:
        """Return the properties of one NIC."""
        return self.others.get((host, nic), self.link)

    @property
    def widest_mtu(self) -> int:
        """MTU of the switches: the largest MTU of any NIC."""
        return max(self.link_of(*place).mtu for place in self.places)


def nic_names(topology: Topology) -> list[str]:
    """Return the names of a host's NICs.

    >>> nic_names(Topology(num_hosts=2, num_nics=2))
    ['eth0', 'eth1']
    """
    return [f"eth{nic}" for nic in range(topology.num_nics)]


def address_of(host: int, nic: int) -> str:
    """Return the address of a NIC; those of one rail share a /24.

    >>> address_of(host=2, nic=1)
    '10.77.1.3'
    """
    return f"10.77.{nic}.{host + 1}"


def mac_of(host: int, nic: int) -> str:
    """Return the MAC address of a NIC, from the locally administered range.

    >>> mac_of(host=2, nic=1)
    '02:77:00:00:01:02'
    """
    return f"02:77:00:00:{nic:02x}:{host:02x}"


def name_of(host: int) -> str:
    """Return the name of a host."""
    return f"host{host}"


def hosts_file(topology: Topology) -> str:
    """Return an /etc/hosts with every host by its first address, and a name for every address.

    Also for IPv4-mapped IPv6 addresses, which torch's store looks up.
    """
    names = [
        (address_of(host, nic), f"{name_of(host)}-eth{nic}" if nic else name_of(host))
        for nic in range(topology.num_nics)
        for host in range(topology.num_hosts)
    ]
    lines = [f"{prefix}{address} {name}" for prefix in ("", "::ffff:") for address, name in names]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def port_of(host: int, nic: int) -> str:
    """Return the name of the switch port of a NIC.

    >>> port_of(host=2, nic=1)
    'port2.1'
    """
    return f"port{host}.{nic}"


def token_bucket(device: str, rate_bits_per_s: float) -> Command:
    """Return the `tc` command that limits what a device sends.

    >>> " ".join(token_bucket("eth0", 5e8))
    'qdisc add dev eth0 root tbf rate 500000000bit burst 131072b limit 1381072b'
    """
    per_s = rate_bits_per_s / 8
    burst = max(_MIN_BURST, round(per_s * _BURST_S))
    limit = burst + max(_MIN_QUEUE, round(per_s * _QUEUE_S))
    rate = f"{round(rate_bits_per_s)}bit"
    return f"qdisc add dev {device} root tbf rate {rate} burst {burst}b limit {limit}b".split()


def patience_s(rate_bits_per_s: float) -> float:
    """Return the maximum queueing time of a frame in a switch, in seconds.

    >>> patience_s(1e9), round(patience_s(20e6), 2)
    (0.02, 0.1)
    """
    return max(_QUEUE_S, _MIN_QUEUE / (rate_bits_per_s / 8))


def switch_commands(topology: Topology, *, host_namespaces: list[str]) -> list[Command]:
    """Return the `ip` commands that create the rails, and every NIC in its host.

    Args:
        host_namespaces: path of each host's namespace.
    """
    commands = []
    for nic in range(topology.num_nics):
        commands.append(f"link add rail{nic} mtu {topology.widest_mtu} type bridge mcast_snooping 0")
        commands.append(f"link set rail{nic} up addrgenmode none")
    for host, nic in topology.places:
        link, port = topology.link_of(host, nic), port_of(host, nic)
        there = f"name eth{nic} mtu {link.mtu} address {mac_of(host, nic)} netns {host_namespaces[host]}"
        commands.append(f"link add {port} mtu {topology.widest_mtu} type veth peer {there}")
        if link.cable == "whole":
            commands.append(f"link set {port} master rail{nic}")
        if link.cable != "unplugged":
            commands.append(f"link set {port} up addrgenmode none")
    return [command.split() for command in commands]


def forwarding_ports(shown: str) -> set[str]:
    """Return the ports in forwarding state, from `ip -json -details link show type bridge_slave`."""
    ports: list[dict[str, Any]] = json.loads(shown or "[]")  # any: the JSON of another program
    states = {port["ifname"]: port.get("linkinfo", {}).get("info_slave_data", {}) for port in ports if port}
    return {name for name, state in states.items() if state.get("state") == "forwarding"}


def switch_limits(topology: Topology) -> list[Command]:
    """Return the `tc` commands that limit the switches' rate to each NIC."""
    rates = {port_of(*place): topology.link_of(*place).bits_per_s for place in topology.places}
    return [token_bucket(port, rate) for port, rate in rates.items() if rate < float("inf")]


def host_commands(topology: Topology, host: int) -> list[Command]:
    """Return the `ip` commands that bring a host's NICs up; the first has the default route."""
    commands = ["link set lo up"]
    for nic, name in enumerate(nic_names(topology)):
        commands.append(f"link set {name} up addrgenmode none")
        commands.append(f"address add {address_of(host, nic)}/24 dev {name}")
    commands.append("route add default dev eth0")
    return [command.split() for command in commands]


def tap_commands(topology: Topology, host: int) -> list[Command]:
    """Return the `ip` commands that configure TAP devices like a host's NICs."""
    commands = []
    for nic, name in enumerate(nic_names(topology)):
        link = topology.link_of(host, nic)
        commands.append(f"link set {name} address {mac_of(host, nic)} mtu {link.mtu}")
        if link.cable == "unplugged":
            commands.append(f"link set {name} carrier off")
    return [command.split() for command in commands]


def host_limits(topology: Topology, host: int) -> list[Command]:
    """Return the `tc` commands that limit a host's sending rate."""
    rates = {name: topology.link_of(host, nic).bits_per_s for nic, name in enumerate(nic_names(topology))}
    return [token_bucket(name, rate) for name, rate in rates.items() if rate < float("inf")]


_PORT = 29_500  # any port: each host has its own


def environments(
    topology: Topology, *, processes_per_host: int, num_cores: int, together: bool = True
) -> list[tuple[int, dict[str, str]]]:
    """Return the host and the environment of each process.

    The hosts share the cores of one machine, so each process gets its share of them, and no GPU: NCCL refuses
    two ranks on one GPU.

    Args:
        together: True: ranks of one job; False: each process is a job of its own.


    >>> topology = Topology(num_hosts=2, num_nics=2)
    >>> host, names = environments(topology, processes_per_host=2, num_cores=8)[3]
    >>> host, names["RANK"], names["LOCAL_RANK"], names["MASTER_ADDR"], names["GLOO_SOCKET_IFNAME"]
    (1, '3', '1', '10.77.0.1', 'eth0,eth1')
    """
    world_size = topology.num_hosts * processes_per_host
    same = {
        "WORLD_SIZE": str(world_size if together else 1),
        "LOCAL_WORLD_SIZE": str(processes_per_host if together else 1),
        "MASTER_ADDR": address_of(0, 0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": ",".join(nic_names(topology)),
        "OMP_NUM_THREADS": str(max(1, num_cores // world_size)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return [
        (rank // processes_per_host, {**same, **_who(rank if together else 0, processes_per_host)})
        for rank in range(world_size)
    ]


def _who(rank: int, processes_per_host: int) -> dict[str, str]:
    host, local = divmod(rank, processes_per_host)
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)}

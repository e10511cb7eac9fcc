"""Probe of this machine's network interfaces through the kernel; needs no tools and no root.

The queries use a socket (netdevice(7), ethtool) and /proc/net, so the answers are those of this process's
network namespace; /sys/class/net may show another one's, and is not read.
"""

import fcntl
import socket
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv6Address, ip_interface
from pathlib import Path

from penstock.core.network.nics import Nic

_FLAGS, _ADDRESS, _NETMASK, _MTU, _ETHTOOL = 0x8913, 0x8915, 0x891B, 0x8921, 0x8946  # linux/sockios.h
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40  # linux/if.h
_GET_SETTINGS, _GET_DRIVER = 0x1, 0x3  # linux/ethtool.h
_DRIVER_BYTES, _SETTINGS_BYTES = 196, 44
_UNKNOWN_SPEED = (0xFFFFFFFF, 0xFFFF, 0)
_SYS = Path("/sys/bus")


def probe_nics() -> list[Nic]:
    """Return the network interfaces of this machine without the loopback, in the kernel's order.

    Empty on systems other than Linux.
    """
    if sys.platform != "linux":
        return []
    default = default_routes(_read(Path("/proc/net/route")), _read(Path("/proc/net/ipv6_route")))
    ipv6 = ipv6_addresses(_read(Path("/proc/net/if_inet6")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        names = [name for _, name in socket.if_nameindex()]
        found = [_probe(asking, name, ipv6.get(name, ()), name in default) for name in names]
    return [nic for nic in found if nic is not None]


def default_routes(route: str, ipv6_route: str) -> set[str]:
    """Return the interfaces of default routes, from the texts of /proc/net/route and ipv6_route.

    >>> default_routes("Iface Destination Gateway Flags\\neth0 00000000 010200C0 0003", "")
    {'eth0'}
    """
    rows = [line.split() for line in route.splitlines()[1:]]
    found = {row[0] for row in rows if len(row) > 1 and row[1] == "00000000"}
    for line in ipv6_route.splitlines():
        row = line.split()
        if len(row) > 9 and row[1] == "00" and row[9] != "lo":  # prefix length 0: default route
            found.add(row[9])
    return found


def ipv6_addresses(if_inet6: str) -> Mapping[str, Sequence[str]]:
    """Return the IPv6 addresses of each interface, from the text of /proc/net/if_inet6.

    >>> ipv6_addresses("fd000000000000000000000000000002 04 40 00 82     eth0")
    {'eth0': ['fd00::2/64']}
    """
    found: dict[str, list[str]] = {}
    for line in if_inet6.splitlines():
        address, _, prefix, _, _, name = line.split()
        found.setdefault(name, []).append(f"{IPv6Address(int(address, 16))}/{int(prefix, 16)}")
    return found


def _probe(asking: socket.socket, name: str, ipv6: Sequence[str], has_default: bool) -> Nic | None:
    """Return the kernel's data of one interface; None for the loopback and for one that has just gone."""
    try:
        (flags,) = struct.unpack_from("H", _ask(asking, name, _FLAGS), 16)
        (mtu,) = struct.unpack_from("i", _ask(asking, name, _MTU), 16)
    except OSError:
        return None
    if flags & _LOOPBACK:
        return None
    driver, bus = _driver(asking, name)
    device = next(_SYS.glob(f"*/devices/{bus}"), None) if bus else None
    numa_node = _number(device, "numa_node")
    addresses = (*_ipv4(asking, name), *ipv6)
    return Nic(
        name=name,
        is_up=bool(flags & _UP and flags & _RUNNING),
        mtu=mtu,
        speed_mbit_s=_speed(asking, name),
        addresses=addresses,
        carries_default_route=has_default,
        driver=driver,
        bus=bus,
        numa_node=None if numa_node is None or numa_node < 0 else numa_node,
        rdma_devices=tuple(sorted(path.name for path in device.glob("infiniband/*"))) if device else (),
        is_virtual_function=device is not None and (device / "physfn").exists(),
        num_virtual_functions=_number(device, "sriov_totalvfs") or 0,
        carries_own_network=not addresses or _carries(addresses[0]),
    )


def _ask(asking: socket.socket, name: str, question: int) -> bytes:
    return fcntl.ioctl(asking, question, struct.pack("16s24x", name.encode()))


def _ask_ethtool(asking: socket.socket, name: str, question: int, num_bytes: int) -> bytes:
    """Return the answer of an interface's driver; b"" if it does not support the query."""
    answer = array("B", struct.pack("I", question).ljust(num_bytes, b"\0"))
    request = struct.pack("16sP16x", name.encode(), answer.buffer_info()[0])
    try:
        fcntl.ioctl(asking, _ETHTOOL, request)
    except OSError:
        return b""
    return answer.tobytes()


def _driver(asking: socket.socket, name: str) -> tuple[str, str]:
    """Return a driver's name and its device's bus address (struct ethtool_drvinfo)."""
    answer = _ask_ethtool(asking, name, _GET_DRIVER, _DRIVER_BYTES)
    return _text(answer[4:36]), _text(answer[100:132])


def _speed(asking: socket.socket, name: str) -> int | None:
    """Return Mbit/s, stored in two separate halves in struct ethtool_cmd."""
    answer = _ask_ethtool(asking, name, _GET_SETTINGS, _SETTINGS_BYTES)
    if not answer:
        return None
    (low,), (high,) = struct.unpack_from("H", answer, 12), struct.unpack_from("H", answer, 28)
    speed: int = low | high << 16
    return None if speed in _UNKNOWN_SPEED else speed


def _ipv4(asking: socket.socket, name: str) -> Iterator[str]:
    """Yield an interface's first IPv4 address, if it has one."""
    try:
        address, mask = (_ask(asking, name, question)[20:24] for question in (_ADDRESS, _NETMASK))
    except OSError:
        return
    yield str(ip_interface(f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}"))


def _carries(address: str) -> bool:
    """Return True if a connection to a neighbour of an address begins at it. Nothing is sent."""
    own = ip_interface(address)
    others = [own.network[index] for index in range(1, min(3, own.network.num_addresses))]
    neighbour = next((other for other in others if other != own.ip), None)
    if neighbour is None or own.ip.is_link_local:
        return True
    family = socket.AF_INET if own.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((str(neighbour), 9))
            return str(asked.getsockname()[0]) == str(own.ip)
        except OSError:  # no route leads there
            return False


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")


def _number(device: Path | None, name: str) -> int | None:
    text = _read(device / name).strip() if device else ""
    return int(text) if text.lstrip("-").isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such device, or no IPv6
        return ""

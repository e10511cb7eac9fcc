"""Network namespaces and TAP devices of emulated hosts, and their traffic counters.

A namespace is held by a file descriptor of this process and by the processes inside it. When they end, also
by SIGKILL, the kernel removes the namespace with all its contents; no clean-up is needed. Only the calling
thread changes its namespace, so other threads are unaffected.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

from penstock.core.errors import UsageError

_NEW_NETWORK, _NEW_MOUNTS, _NEW_HOST_NAME = 0x4000_0000, 0x0002_0000, 0x0400_0000
_PRIVATE, _RECURSIVE, _BIND = 1 << 18, 1 << 14, 1 << 12
_OWN = "/proc/thread-self/ns/net"


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 on success."""
    library = ctypes.CDLL(None, use_errno=True)  # os.setns and os.unshare need Python 3.12
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _own() -> int:
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def new_namespace() -> int:
    """Create an empty network namespace; return a descriptor that holds it, to be closed by the caller.

    Raises:
        UsageError: this process lacks the permission.
    """
    try:
        home = _own()
    except OSError:
        raise UsageError(
            "Emulated hosts need the namespaces of Linux, 3.17 or newer",
            fix="Run it on such a machine, as root or with unprivileged user namespaces.",
        ) from None
    try:
        _call("unshare", _NEW_NETWORK)
        try:
            return _own()
        finally:
            _call("setns", home, _NEW_NETWORK)
    except PermissionError:
        raise UsageError(
            "This process may not create network namespaces, which emulated hosts need",
            fix="Run it as root (in a container: with CAP_SYS_ADMIN and CAP_NET_ADMIN), "
            "or as `unshare --map-root-user --net penstock ...`.",
        ) from None
    finally:
        os.close(home)


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Move the calling thread, and processes it starts, into the network of a namespace."""
    home = _own()
    try:
        _call("setns", namespace, _NEW_NETWORK)
        try:
            yield
        finally:
            _call("setns", home, _NEW_NETWORK)
    finally:
        os.close(home)


def settle(namespace: int, *, host_name: str, names: str) -> None:
    """Move this process into a namespace permanently, with a matching host name and /etc files.

    Args:
        names: content of /etc/hosts there.

    Raises:
        UsageError: this process lacks the permission.
    """
    try:
        _call("setns", namespace, _NEW_NETWORK)
        _call("unshare", _NEW_MOUNTS | _NEW_HOST_NAME)
        _call("mount", None, b"/", None, _PRIVATE | _RECURSIVE, None)
        _mount_files({"hosts": names, "resolv.conf": ""})
        _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)  # /sys/class/net shows the mounter's network
        socket.sethostname(host_name)
    except PermissionError as error:
        raise UsageError(
            f"This process may not enter an emulated host ({error.strerror})",
            fix="Run it as root, in a container with CAP_SYS_ADMIN and no profile that forbids mounts.",
        ) from None


def _mount_files(texts: dict[str, str]) -> None:
    """Replace files in /etc for this process only; nothing remains afterwards.

    Without them a rank waits seconds for its peer's name, from an unreachable name server.
    """
    _call("mount", b"tmpfs", b"/sys", b"tmpfs", 0, None)  # holds the files; the new /sys is mounted over it
    for name, text in texts.items():
        shown = Path("/etc") / name
        if shown.exists():
            (Path("/sys") / name).write_text(text)
            _call("mount", b"/sys/" + name.encode(), str(shown).encode(), None, _BIND, None)


_FILE = Path("/proc/thread-self/net/dev")
_RECEIVED, _SENT = 0, 8  # columns of bytes


class NicCounters(NamedTuple):
    """Bytes since the NIC was created, with headers of Ethernet, IP and TCP."""

    sent: int
    received: int


def parse_counters(text: str) -> dict[str, NicCounters]:
    """Parse /proc/net/dev, without the loopback.

    >>> parse_counters("h\\nh\\n lo: 5 1 0 0 0 0 0 0 5 1\\neth0: 70 2 0 0 0 0 0 0 90 3 0 0 0 0 0 0")
    {'eth0': NicCounters(sent=90, received=70)}
    """
    counted = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = [int(number) for number in numbers.split()]
        if name.strip() != "lo":
            counted[name.strip()] = NicCounters(sent=columns[_SENT], received=columns[_RECEIVED])
    return counted


def read_counters() -> dict[str, NicCounters]:
    """Read the counters of the calling thread's network namespace."""
    return parse_counters(_FILE.read_text())


HEADER_BYTES = 10
"""Size of virtio's header before each frame (segmentation and checksum data); forwarded unchanged."""
LARGEST_FRAME = 2**16 + 64
"""Largest unsegmented TCP frame, with headers."""

_DEVICE = Path("/dev/net/tun")
_SET_INTERFACE, _SET_OFFLOADS = 0x4004_54CA, 0x4004_54D0
_TAP, _NO_PACKET_HEADER, _VIRTIO_HEADER = 0x0002, 0x1000, 0x4000
_SUMS, _SEGMENTS = 0x01, 0x02  # TUN_F_CSUM, TUN_F_TSO4: frames are not segmented, so there are 1/40 as many


def open_tap(name: str) -> int:
    """Create a NIC in the calling thread's network namespace; return a descriptor for its frames.

    The NIC exists as long as the descriptor. Reads do not block.

    Raises:
        UsageError: the kernel does not support such NICs, or this process may not open them.
    """
    try:
        descriptor = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"A latency needs {_DEVICE}, which cannot be opened ({error.strerror})",
            fix="Load it with `modprobe tun`, and let the container have the device; or ask for no latency.",
        ) from None
    flags = _TAP | _NO_PACKET_HEADER | _VIRTIO_HEADER
    try:
        ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), flags))
        ioctl(descriptor, _SET_OFFLOADS, _SUMS | _SEGMENTS)
    except OSError as error:
        os.close(descriptor)
        raise UsageError(
            f"The kernel refuses a NIC whose cable ends in a process ({error.strerror})",
            fix="Run it as root, in a container with CAP_NET_ADMIN; or ask for no latency.",
        ) from None
    return descriptor

"""NICs whose cables end in a process: frames are read and written as bytes."""

import os
import struct
from fcntl import ioctl
from pathlib import Path

from penstock.core.errors import UsageError

HEADER_BYTES = 10
"""Before each frame, virtio's header says how it is to be cut up and summed; passed on as it came."""
LARGEST_FRAME = 2**16 + 64
"""TCP's largest segment, uncut, with headers."""

_DEVICE = Path("/dev/net/tun")
_SET_INTERFACE, _SET_OFFLOADS = 0x4004_54CA, 0x4004_54D0
_TAP, _NO_PACKET_HEADER, _VIRTIO_HEADER = 0x0002, 0x1000, 0x4000
_SUMS, _SEGMENTS = 0x01, 0x02  # TUN_F_CSUM, TUN_F_TSO4: frames come uncut, a fortieth as many


def open_tap(name: str) -> int:
    """Make a NIC in the network namespace of the calling thread; return the other end of its cable.

    The NIC lasts as long as the descriptor. Reading never waits.

    Raises:
        UsageError: the kernel has no such NICs, or this process may not open them.
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

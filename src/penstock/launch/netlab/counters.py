"""What the NICs of a host have sent and received, from the kernel's own counters."""

from pathlib import Path
from typing import NamedTuple

_FILE = Path("/proc/thread-self/net/dev")
_RECEIVED, _SENT = 0, 8  # columns of bytes


class Counted(NamedTuple):
    """Bytes since a NIC was made, with the headers of Ethernet, IP and TCP."""

    sent: int
    received: int


def parse_counters(text: str) -> dict[str, Counted]:
    """Read /proc/net/dev; the loopback is no NIC.

    >>> parse_counters("h\\nh\\n lo: 5 1 0 0 0 0 0 0 5 1\\neth0: 70 2 0 0 0 0 0 0 90 3 0 0 0 0 0 0")
    {'eth0': Counted(sent=90, received=70)}
    """
    counted = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = [int(number) for number in numbers.split()]
        if name.strip() != "lo":
            counted[name.strip()] = Counted(sent=columns[_SENT], received=columns[_RECEIVED])
    return counted


def read_counters() -> dict[str, Counted]:
    """Read the counters of the network namespace that the calling thread is in."""
    return parse_counters(_FILE.read_text())

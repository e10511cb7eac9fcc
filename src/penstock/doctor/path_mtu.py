"""Path MTU: the largest packet that crosses a network whole, by datagrams that routers may not split.

If a switch silently drops packets that are too large, TCP connects, small messages pass, and transfers hang.
Each large datagram is followed by a small one: a loss counts only if the small one came back, so that a busy
machine does not count as a bad network.
"""

import socket
import threading
from collections.abc import Callable

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.doctor.link import LinkMeasurement
from penstock.doctor.node_group import NodeGroup

_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: never split, ignore the known path MTU
_HEADERS = 28  # of IPv4 and UDP
_MIN_PACKET = 576
LARGEST = 65_535
"""Size of an IP packet in bytes."""
_ATTEMPTS = 3
_POLL_S = 0.1


def largest_arriving(
    party: NodeGroup, link: LinkMeasurement, address: str, *, where: str, timeout_s: float
) -> tuple[int, int]:
    """Return the largest packet, at most `link.packet_bytes`, that crosses to the other node; 0: unknown.

    The other node must call this at the same time, and gets the same result.

    Args:
        address: address of this node's interface.
        where: prefix of the keys in the store.
    """
    if ":" in address:
        return 0, 0
    over = threading.Event()
    with _open(address) as answering, _open(address) as asking:
        thread = threading.Thread(target=_answer, args=(answering, over), name="doctor-packets")
        thread.start()
        try:
            party.say(f"{where}/port/{link.source}", answering.getsockname())
            target = tuple(party.hear(f"{where}/port/{link.target}", timeout_s=timeout_s))
            found = largest(lambda size: _arrives(asking, target, size), max_bytes=link.packet_bytes)
            party.say(f"{where}/arriving/{link.source}", found)
            back: int = party.hear(f"{where}/arriving/{link.target}", timeout_s=2 * timeout_s)
        except PenstockError:  # the other node is gone, which the transfers will report
            return 0, 0
        finally:
            over.set()
            thread.join()
    return found, back


def largest(arrives: Callable[[int], bool], *, max_bytes: int) -> int:
    """Return the largest packet that arrives, 0 if none does.

    >>> largest(lambda size: size <= 1400, max_bytes=1500)
    1400
    """
    if arrives(max_bytes):
        return max_bytes
    if not arrives(_MIN_PACKET):
        return 0
    low, high = _MIN_PACKET, max_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if arrives(middle) else (low, middle)
    return low


def _open(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
    made.settimeout(_POLL_S)
    made.bind((address, 0))
    return made


def _answer(answering: socket.socket, over: threading.Event) -> None:
    """Send the length of each datagram back."""
    while not over.is_set():
        try:
            content, sender = answering.recvfrom(2**16)
            answering.sendto(content[:8], sender)
        except OSError:  # nothing arrived, or the sender's port is closed
            continue


def _arrives(asking: socket.socket, target: tuple[str, int], packet: int) -> bool:
    """Return True if a packet returns before a smaller one sent after it, in one of several attempts."""
    for attempt in range(_ATTEMPTS):
        large, small = f"L{packet:05}{attempt:02}".encode(), f"S{packet:05}{attempt:02}".encode()
        try:
            asking.sendto(large.ljust(packet - _HEADERS, b"."), target)
            asking.sendto(small, target)
        except OSError:  # larger than the local interface can send
            return False
        if _first_back(asking, large, small):
            return True
    return False


def _first_back(asking: socket.socket, large: bytes, small: bytes) -> bool:
    """Wait for either answer; return True if the large packet's came first."""
    deadline = clock.monotonic() + 1.0
    while clock.monotonic() < deadline:
        try:
            answer = asking.recv(64)
        except OSError:
            continue
        if answer in (large, small):
            return answer == large
    return False

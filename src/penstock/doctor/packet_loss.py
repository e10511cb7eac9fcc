"""Packet loss of a link, measured by short bursts and the kernel's count of retransmissions.

A transfer at full speed overflows queues, so TCP retransmits by design. A burst of ten packets, sent only
after the previous one has arrived, is too small for that: its retransmissions mean loss. Duplicates that the
receiver reports (DSACK) do not: a slow link that answers late causes them. Linux counts both for each socket
(TCP_INFO).

At least 200 packets are sent, unless a burst is not answered in time. If one of them was lost, more follow,
up to 1,000, until ten were lost: one loss in 200 packets says little, and a link that loses packets is worth
the seconds. So a loss of 5% is missed
by 4 of 100,000 measurements (tests/unit/doctor/test_packet_loss.py computes it).
"""

import socket
import struct
import sys

from penstock.core import clock

PACKETS = 10
"""Packets of a burst."""
_BURST_BYTES = PACKETS * 1448
"""Payload of ten packets of Ethernet."""
_MIN_BURSTS, MAX_BURSTS = 20, 100
_SURE_LOST = 10
"""Lost packets that suffice to tell the share."""
_LONG_ENOUGH_S = 0.3
_RETRANSMITTED_AT, _SEGMENTS_AT, _TWICE_AT = 100, 156, 216
"""Offsets of tcpi_total_retrans, tcpi_data_segs_out, tcpi_dsack_dups in `struct tcp_info`, 32 bits each."""
_INFO_BYTES = 220


def is_enough(bursts: int, *, lost: int, seconds: float) -> bool:
    """Return True if no further burst is needed.

    Args:
        bursts: number sent so far.
        lost: packets lost so far.
        seconds: time that the bursts took.

    >>> [is_enough(20, lost=lost, seconds=0.5) for lost in (0, 1, 10)]
    [True, False, True]
    """
    if not _MIN_BURSTS <= bursts < MAX_BURSTS:
        return bursts >= MAX_BURSTS
    return seconds > _LONG_ENOUGH_S and (lost == 0 or lost >= _SURE_LOST)


def send_bursts(line: socket.socket) -> float:
    """Send bursts to a peer in `receive_bursts`; return the share of packets that had to be sent again.

    Returns 0 where the kernel does not count. A later burst that is not answered in time is the last one.

    Raises:
        OSError: the peer does not answer the first burst within the socket's timeout.
    """
    content, start = bytes(_BURST_BYTES), clock.monotonic()
    bursts = lost = sent = 0
    while not is_enough(bursts, lost=lost, seconds=clock.monotonic() - start):
        try:
            line.sendall(content)
            if not line.recv(1):
                raise ConnectionResetError("the peer hung up")
            bursts += 1
        except TimeoutError:
            if not bursts:
                raise
            lost, sent = _counts(line)
            break
        lost, sent = _counts(line)
    line.shutdown(socket.SHUT_WR)
    return lost / sent if sent else 0.0


def receive_bursts(line: socket.socket) -> None:
    """Receive the bursts of a peer, and answer each, until the peer ends.

    Raises:
        OSError: the peer sends nothing within the socket's timeout.
    """
    received = 0
    while more := len(line.recv(65536)):
        received += more
        while received >= _BURST_BYTES:
            received -= _BURST_BYTES
            line.sendall(b".")


def _counts(line: socket.socket) -> tuple[int, int]:
    """Return how many packets with data were lost and sent again, and how many were sent in all."""
    if not sys.platform.startswith("linux"):
        return 0, 0
    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:  # before Linux 4.19
        return 0, 0
    again, sent, twice = (
        struct.unpack_from("=I", info, at)[0] for at in (_RETRANSMITTED_AT, _SEGMENTS_AT, _TWICE_AT)
    )
    return max(0, again - twice), sent

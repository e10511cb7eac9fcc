"""Packet loss of a link, measured by short bursts and the kernel's count of retransmissions.

A transfer at full speed overflows queues, so TCP retransmits by design. A burst of ten packets, sent only
after the previous one has arrived, is too small for that: its retransmissions mean loss. Duplicates that the
receiver reports (DSACK) do not: a slow link that answers late causes them. Linux counts both for each socket
(TCP_INFO).
"""

import socket
import struct
import sys

from penstock.core import clock

_BURST = 10 * 1448
"""Bytes: ten packets of Ethernet."""
_MOST_BURSTS, _LEAST_BURSTS = 100, 20
_LONG_ENOUGH_S = 0.3
_RETRANSMITTED_AT, _SEGMENTS_AT, _TWICE_AT = 100, 156, 216
"""Offsets of tcpi_total_retrans, tcpi_data_segs_out, tcpi_dsack_dups in `struct tcp_info`, 32 bits each."""
_INFO_BYTES = 220


def send_bursts(line: socket.socket) -> float:
    """Send bursts to a peer in `take_bursts`; return the share of packets that had to be sent again.

    Returns 0 where the kernel does not count.

    Raises:
        OSError: the peer does not answer within the socket's timeout.
    """
    content, start = bytes(_BURST), clock.monotonic()
    for number in range(_MOST_BURSTS):
        if number >= _LEAST_BURSTS and clock.monotonic() - start > _LONG_ENOUGH_S:
            break
        line.sendall(content)
        if not line.recv(1):
            raise ConnectionResetError("the peer hung up")
    again, sent = _counts(line)
    line.shutdown(socket.SHUT_WR)
    return again / sent if sent else 0.0


def take_bursts(line: socket.socket) -> None:
    """Take the bursts of a peer until it ends.

    Raises:
        OSError: it says nothing within the socket's timeout.
    """
    taken = 0
    while more := len(line.recv(65536)):
        taken += more
        while taken >= _BURST:
            taken -= _BURST
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

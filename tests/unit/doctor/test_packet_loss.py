"""Loss of packets, as the kernel counts it for a socket of the doctor's own."""

import socket
import threading
from contextlib import closing

import pytest

from penstock.doctor.packet_loss import _counts, send_bursts, take_bursts


@pytest.fixture
def line():
    """Two ends of a connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname(), 10)
        other, _ = listening.accept()
        with closing(one), closing(other):
            yield one, other


def test_the_loopback_loses_nothing_and_its_packets_are_counted(line):
    one, other = line
    taking = threading.Thread(target=take_bursts, args=(other,))
    taking.start()
    assert send_bursts(one) == 0.0
    taking.join()
    again, sent = _counts(one)
    assert again == 0
    assert sent >= 20


def test_a_peer_that_hangs_up_is_an_error(line):
    one, other = line
    other.close()
    with pytest.raises(ConnectionError):
        send_bursts(one)

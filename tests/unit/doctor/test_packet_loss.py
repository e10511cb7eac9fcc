"""Loss of packets, as the kernel counts it for a socket of the doctor's own."""

import re
import socket
import threading
from collections import Counter
from contextlib import closing
from math import comb, inf
from pathlib import Path

import numpy as np
import pytest

from penstock.doctor.judge_links import _LOSSY, _SOMEWHAT_LOSSY
from penstock.doctor.packet_loss import MAX_BURSTS, PACKETS, _counts, is_enough, receive_bursts, send_bursts

PAGE = Path(__file__).resolve().parents[3] / "docs/explanation/link-measurement.md"


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
    receiving = threading.Thread(target=receive_bursts, args=(other,))
    receiving.start()
    assert send_bursts(one) == 0.0
    receiving.join()
    again, sent = _counts(one)
    assert again == 0
    assert sent >= 20


def test_a_peer_that_hangs_up_is_an_error(line):
    one, other = line
    other.close()
    with pytest.raises(ConnectionError):
        send_bursts(one)


def test_a_burst_that_does_not_arrive_in_time_ends_the_measurement(line):
    """Packets of its size have passed: a link that loses a fifth of them stalls for seconds at times."""
    one, other = line
    one.settimeout(0.05)
    other.sendall(b".")  # the answer to the first burst; nothing answers the second
    assert send_bursts(one) == 0.0
    receive_bursts(other)
    assert other.recv(1) == b"", "the sender ended"


def test_a_first_burst_that_does_not_arrive_in_time_is_an_error(line):
    one, _ = line
    one.settimeout(0.05)
    with pytest.raises(TimeoutError):
        send_bursts(one)


def chances(share, *, seconds):
    """Return the exact probabilities that a link is reported, and in red, if packets are lost independently.

    A packet is sent until it arrives, so the losses of a burst have a negative binomial distribution.

    Args:
        seconds: that all bursts take so far: inf on a slow link, 0 on a fast one.
    """
    losses = [comb(PACKETS - 1 + k, k) * share**k * (1 - share) ** PACKETS for k in range(60)]
    going, ended = np.ones(1), Counter()
    for bursts in range(1, MAX_BURSTS + 1):
        going = np.convolve(going, losses)
        for lost in map(int, going.nonzero()[0]):
            if is_enough(bursts, lost=lost, seconds=seconds):
                ended[lost / (PACKETS * bursts + lost)] += going[lost]
                going[lost] = 0.0
    assert not going.any()
    above = lambda limit: sum(chance for found, chance in ended.items() if found > limit)  # noqa: E731
    return above(_SOMEWHAT_LOSSY), above(_LOSSY)


def test_a_loss_of_5_percent_is_missed_less_often_than_once_in_1000_measurements():
    for seconds in (0.0, inf):
        _, in_red = chances(0.05, seconds=seconds)
        assert 1 - in_red < 1e-3


def test_the_page_has_the_chances_of_each_loss():
    rows = re.findall(r"^\| ([\d.]+)% \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 6
    for share, columns in rows:
        told = [word.strip().removesuffix("%") for word in columns.split("|")]
        found = [
            100 * chance for seconds in (inf, 0.0) for chance in chances(float(share) / 100, seconds=seconds)
        ]
        decimals = [len(word.partition(".")[2]) for word in told]
        assert [f"{value:.{n}f}" for value, n in zip(found, decimals, strict=True)] == told

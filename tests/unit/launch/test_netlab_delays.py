"""When a switch that takes its time passes frames on."""

import pytest

from penstock.netlab.switch import Port
from penstock.netlab.topology import Link, Topology, mac_of, tap_commands


def leaving_times(port: Port, arrivals: list[float], *, size: int) -> list[float]:
    for now in arrivals:
        port.add(bytes(size), now=now)
    times = []
    while port.next_at < float("inf"):
        times.append(port.next_at)
        port.take(now=port.next_at)
    return times


def test_frames_that_come_at_once_leave_one_after_another_at_the_rate() -> None:
    port = Port(latency_s=0.5, bytes_per_s=100, patience_s=10)
    assert leaving_times(port, [1.0, 1.0, 1.0], size=10) == pytest.approx([1.6, 1.7, 1.8])


def test_frames_that_come_apart_all_wait_for_the_latency_alone() -> None:
    port = Port(latency_s=0.5, bytes_per_s=float("inf"), patience_s=0.0)
    assert leaving_times(port, [1.0, 2.0, 3.0], size=10) == [1.5, 2.5, 3.5]


def test_without_a_rate_nothing_is_ever_dropped() -> None:
    port = Port(latency_s=0.1, bytes_per_s=float("inf"), patience_s=0.0)
    assert all(port.add(b"x", now=0.1 * n) for n in range(100))


def test_nothing_is_given_out_before_it_is_due() -> None:
    port = Port(latency_s=0.5, bytes_per_s=100, patience_s=10)
    port.add(b"x", now=0.0)
    assert port.take(now=port.next_at - 1e-9) == []


def test_nics_of_a_process_get_the_addresses_and_limits_of_others() -> None:
    topology = Topology(num_hosts=2, num_nics=2, others={(1, 1): Link(mtu=9000, cable="unplugged")})
    assert [" ".join(command) for command in tap_commands(topology, 1)] == [
        f"link set eth0 address {mac_of(1, 0)} mtu 1500",
        f"link set eth1 address {mac_of(1, 1)} mtu 9000",
        "link set eth1 carrier off",
    ]

"""Emulated hosts: what they see, what their NICs count, and that nothing of them is left."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.launch.local import JobOutcome
from penstock.netlab.hosts import Hosts, lab, why_not
from penstock.netlab.namespaces import new_namespace
from penstock.netlab.topology import Link
from penstock.parallel.mesh import World
from penstock.testing.ranks import on_hosts

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
LATE_S = 0.001
can_be_late = pytest.mark.skipif(bool(why_not(latency_s=LATE_S)), reason=why_not(latency_s=LATE_S))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts with two NICs; one of the four is unlike the others."""
    with lab(hosts=2, nics=2, rate="400mbit", links={(1, 1): Link(rate="30mbit", mtu=1400)}) as hosts:
        yield hosts


def shown(hosts: Hosts, host: int, *command: str) -> str:
    with hosts.inside(host):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def test_the_kernel_limits_every_nic_to_its_rate(hosts: Hosts) -> None:
    assert "rate 400Mbit" in shown(hosts, 0, "tc", "qdisc", "show", "dev", "eth1")
    assert "rate 30Mbit" in shown(hosts, 1, "tc", "qdisc", "show", "dev", "eth1")
    assert "mtu 1400" in shown(hosts, 1, "ip", "link", "show", "eth1")


def test_a_rank_sees_its_host_and_not_this_machine(hosts: Hosts, tmp_path: Path) -> None:
    def look() -> int:
        seen = [os.uname().nodename, *sorted(os.listdir("/sys/class/net"))]  # noqa: PTH208 - names, not paths
        seen += [socket.gethostbyaddr(address)[0] for address in ("10.77.0.2", "10.77.1.1")]
        (tmp_path / os.environ["RANK"]).write_text(" ".join(seen))
        return 0

    here = os.uname().nodename, Path("/etc/hosts").read_text()
    assert hosts.run(look, processes_per_host=2) == JobOutcome(0, [])
    lines = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert lines == [f"host{rank // 2} eth0 eth1 lo host1 host0-eth1" for rank in range(4)]
    assert (os.uname().nodename, Path("/etc/hosts").read_text()) == here


def test_what_ranks_send_is_counted_at_the_nics_of_their_hosts(hosts: Hosts) -> None:
    size = 2**20

    def exchange(world: World) -> float:
        mine = torch.full((size // 4,), float(world.ranks.rank))
        theirs = torch.empty_like(mine)
        other = 1 - world.ranks.rank
        works = [dist.isend(mine, other), dist.irecv(theirs, other)]
        for work in works:
            assert work is not None
            work.wait()
        return float(theirs[-1])

    before = hosts.sent_bytes()
    assert on_hosts(exchange, hosts) == [1.0, 0.0]
    sent = [after - earlier for after, earlier in zip(hosts.sent_bytes(), before, strict=True)]
    assert all(size < bytes_ < 2 * size for bytes_ in sent), sent  # the rest: headers, and how they met


def test_processes_of_one_host_do_not_use_its_nics(hosts: Hosts) -> None:
    def reduce(world: World) -> float:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        value = torch.ones(2**20)
        dist.all_reduce(value, group=pairs[world.ranks.rank // 2])
        return float(value[0])

    before = hosts.sent_bytes()
    assert on_hosts(reduce, hosts, processes_per_host=2) == [2.0] * 4
    sent = [after - earlier for after, earlier in zip(hosts.sent_bytes(), before, strict=True)]
    assert all(bytes_ < 2**20 for bytes_ in sent), sent  # a reduction over the NIC would be 4 MiB


def test_a_failing_rank_fails_the_job_with_its_words(hosts: Hosts) -> None:
    def fail() -> int:
        if os.environ["RANK"] == "1":
            raise PenstockError("Its disk is full")
        signal.pause()
        return 0

    assert hosts.run(fail) == JobOutcome(1, ["PenstockError: Its disk is full."])


@pytest.mark.parametrize("latency_s", [0.0, pytest.param(LATE_S, marks=can_be_late)])
@pytest.mark.parametrize(("cable", "has_carrier"), [("unplugged", False), ("deaf", True)])
def test_a_dead_link_carries_nothing(
    cable: Literal["unplugged", "deaf"], has_carrier: bool, latency_s: float
) -> None:
    with lab(hosts=3, latency_s=latency_s, links={(1, 0): Link(cable=cable)}) as hosts:
        with hosts.inside(2):
            ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with hosts.inside(0):
            mouth = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with ear, mouth:
            ear.settimeout(60)
            ear.bind(("", 9000))
            mouth.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            mouth.sendto(b"to all", ("10.77.0.255", 9000))
            assert ear.recv(100) == b"to all"
        assert hosts.counters(2)["eth0"].received > 0
        assert hosts.counters(1)["eth0"].received == 0
        assert ("LOWER_UP" in shown(hosts, 1, "ip", "link", "show", "eth0")) is has_carrier


@can_be_late
def test_no_answer_comes_before_twice_the_latency_and_large_ones_arrive_whole() -> None:
    latency_s = 0.02

    def ask(world: World) -> float:
        other = 1 - world.ranks.rank
        question, answer = torch.ones(2**18), torch.zeros(2**18)
        dist.barrier()
        begun = clock.monotonic()
        if world.is_first:
            dist.send(question, other)
            dist.recv(answer, other)
        else:
            dist.recv(answer, other)
            dist.send(answer, other)
        took_s = clock.monotonic() - begun
        assert bool((answer == 1).all())
        return took_s

    with lab(hosts=2, rate="1gbit", latency_s=latency_s) as hosts:
        took_s, _ = on_hosts(ask, hosts)
        assert took_s >= 2 * latency_s
        assert all(sent > 2**20 for sent in hosts.sent_bytes())


def test_nothing_is_left_after_an_exception() -> None:
    before = interfaces(), os.readlink("/proc/thread-self/ns/net")  # noqa: PTH115 - no path
    with pytest.raises(KeyError), lab(hosts=2, rate="1gbit"):
        raise KeyError
    assert (interfaces(), os.readlink("/proc/thread-self/ns/net")) == before  # noqa: PTH115


def test_a_command_that_the_kernel_refuses_is_shown_and_nothing_is_left() -> None:
    from penstock.netlab.hosts import _apply

    namespace = new_namespace()
    try:
        with pytest.raises(PenstockError, match=r"`ip` could not set up .*nowhere"):
            _apply("ip", [["link", "set", "nowhere", "up"]], namespace)
    finally:
        os.close(namespace)


_OWNER = """
import os, signal
from penstock.netlab import lab
with lab(hosts=2, rate="1gbit") as hosts:
    def work():
        os.write(1, f"{os.getpid()} {os.readlink('/proc/self/ns/net')}\\n".encode())
        while True:
            signal.pause()
    hosts.run(work)
"""


def test_after_a_kill_the_kernel_ends_the_ranks_and_with_them_their_hosts() -> None:
    """Nobody sweeps: a namespace without a name lasts as long as somebody is in it or holds it."""
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        ranks = [owner.stdout.readline().split() for _ in range(2)]
        watches = [os.pidfd_open(int(pid)) for pid, _ in ranks]
        owner.kill()
        ended = [bool(select.select([watch], [], [], 60)[0]) for watch in watches]
    for watch in watches:
        os.close(watch)
    assert all(ended)
    held = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            held.add(os.readlink(link))  # noqa: PTH115 - no path
        except OSError:  # it has ended, or is another's
            continue
    assert not held & {network for _, network in ranks}

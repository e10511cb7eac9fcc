"""Emulated hosts: create them and run the ranks of a job in them; the kernel removes them."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache

from penstock.core import clock
from penstock.core.env import num_cores
from penstock.core.errors import PenstockError, UsageError
from penstock.launch.local import JobOutcome, RankProcess, run_at
from penstock.netlab import namespaces
from penstock.netlab.namespaces import NicCounters, open_tap, read_counters
from penstock.netlab.switch import switching
from penstock.netlab.topology import (
    Command,
    Link,
    Topology,
    environments,
    forwarding_ports,
    host_commands,
    host_limits,
    hosts_file,
    name_of,
    port_of,
    switch_commands,
    switch_limits,
    tap_commands,
)

_PATIENCE_S = 30.0
_GLANCE_S = 0.005
_WHERE_ROOT_LOOKS = "/usr/local/sbin:/usr/sbin:/sbin"

Explain = Callable[[BaseException], tuple[str, int]]


def _plainly(error: BaseException) -> tuple[str, int]:
    return f"{type(error).__name__}: {error}", 1


@cache
def why_not(*, latency_s: float = 0.0) -> str:
    """Return why hosts cannot be emulated here, by trying one; "" if they can."""
    try:
        with lab(hosts=1, rate="1gbit", latency_s=latency_s) as hosts:
            outcome = hosts.run(lambda: 0)
    except (PenstockError, OSError) as error:
        return str(error)
    return " ".join(outcome.messages)


class Hosts:
    """Hosts of a lab; see `lab`."""

    def __init__(self, topology: Topology, descriptors: list[int]) -> None:
        self.topology = topology
        self._namespaces = descriptors

    def inside(self, host: int) -> AbstractContextManager[None]:
        """Move the calling thread, and processes it starts, into the network of a host."""
        return namespaces.inside(self._namespaces[host])

    def counters(self, host: int) -> dict[str, NicCounters]:
        """Return the bytes sent and received by each NIC of a host; also callable from within a rank."""
        with self.inside(host):
            return read_counters()

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each host has sent so far on all its NICs."""
        hosts = range(self.topology.num_hosts)
        return [sum(nic.sent for nic in self.counters(host).values()) for host in hosts]

    def run(
        self,
        work: Callable[[], int],
        explain: Explain = _plainly,
        *,
        processes_per_host: int = 1,
        together: bool = True,
    ) -> JobOutcome:
        """Run `work` in forked processes on every host, as `launch.local.run` does on this machine.

        They meet as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT are set, and GLOO_SOCKET_IFNAME names all NICs.

        Args:
            work: returns an exit code.
            explain: converts an error to a message and an exit code.
            together: True: ranks of one job; False: each process is a job of its own.

        Raises:
            UsageError: fewer than one process per host.
        """
        if processes_per_host < 1:
            raise UsageError("The number of processes a host must be at least 1", got=processes_per_host)
        names = hosts_file(self.topology)

        def on_host(host: int, environment: dict[str, str]) -> RankProcess:
            where = self._namespaces[host]
            return RankProcess(
                environment, lambda: namespaces.settle(where, host_name=name_of(host), names=names)
            )

        ranks = environments(
            self.topology, processes_per_host=processes_per_host, together=together, num_cores=num_cores()
        )
        return run_at(work, explain, [on_host(host, environment) for host, environment in ranks])


@contextmanager
def lab(
    *,
    hosts: int,
    nics: int = 1,
    rate: str = "",
    mtu: int = 1500,
    latency_s: float = 0.0,
    links: Mapping[tuple[int, int], Link] | None = None,
) -> Iterator[Hosts]:
    """Emulate hosts on one network until the `with` block ends.

    Args:
        rate: bits per second of each NIC in each direction, such as 500mbit; empty: unlimited.
        latency_s: one way, between any two hosts.
        links: NICs that differ from the others, by (host, NIC).

    Raises:
        UsageError: an invalid number, or hosts cannot be emulated here: see `why_not`.
        PenstockError: the kernel refused a part of it.
    """
    link, others = Link(rate=rate, mtu=mtu), links or {}
    topology = Topology(num_hosts=hosts, num_nics=nics, link=link, others=others, latency_s=latency_s)
    with emulated(topology) as made:
        yield made


@contextmanager
def emulated(topology: Topology) -> Iterator[Hosts]:
    """Emulate the hosts of a topology; see `lab`."""
    with ExitStack() as stack:
        descriptors = []
        for _ in range(topology.num_hosts):
            descriptors.append(namespaces.new_namespace())
            stack.callback(os.close, descriptors[-1])
        switch = None
        if topology.latency_s:
            _join_by_process(topology, descriptors, stack)
        else:
            switch = _join_by_bridges(topology, descriptors, stack)
        for host, descriptor in enumerate(descriptors):
            _apply("ip", host_commands(topology, host), descriptor)
            _apply("tc", host_limits(topology, host), descriptor)
        if switch is not None:
            _await_ports(topology, switch)
        yield Hosts(topology, descriptors)


def _join_by_bridges(topology: Topology, hosts: list[int], stack: ExitStack) -> int:
    """Join hosts by kernel bridges; return their namespace."""
    switch = namespaces.new_namespace()
    stack.callback(os.close, switch)
    paths = [f"/proc/self/fd/{host}" for host in hosts]
    _apply("ip", switch_commands(topology, host_namespaces=paths), switch, hand_over=hosts)
    _apply("tc", switch_limits(topology), switch)
    return switch


def _await_ports(topology: Topology, switch: int) -> None:
    """Wait until the switches forward frames, which the kernel does once their ports are up."""
    wanted = {port_of(*place) for place in topology.places if topology.link_of(*place).cable == "whole"}
    words = [_program("ip"), "-json", "-details", "link", "show", "type", "bridge_slave"]
    give_up_at = clock.monotonic() + _PATIENCE_S
    while wanted:
        with namespaces.inside(switch):
            shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        wanted -= forwarding_ports(shown)
        if wanted and clock.monotonic() > give_up_at:
            raise PenstockError(
                f"Ports of an emulated switch forward nothing after {_PATIENCE_S:.0f} s",
                got=sorted(wanted),
                fix="Look at `dmesg`; the kernel's bridge may be filtered.",
            )
        clock.sleep(_GLANCE_S if wanted else 0.0)


def _join_by_process(topology: Topology, hosts: list[int], stack: ExitStack) -> None:
    """Join hosts by a process that delays frames, for which the kernel would need its netem module."""
    taps = {}
    with ExitStack() as opened:  # the process has its own copies
        for host, nic in topology.places:
            with namespaces.inside(hosts[host]):
                taps[host, nic] = open_tap(f"eth{nic}")
            opened.callback(os.close, taps[host, nic])
        for host, namespace in enumerate(hosts):
            _apply("ip", tap_commands(topology, host), namespace)
        stack.enter_context(switching(topology, taps))


def _program(name: str) -> str:
    """Return the path of an iproute2 program, which may only be in root's PATH.

    Raises:
        UsageError: it is not installed.
    """
    found = shutil.which(name) or shutil.which(name, path=_WHERE_ROOT_LOOKS)
    if found is None:
        raise UsageError(
            f"The program {name!r}, required for emulated hosts, is not installed",
            fix="Install the package iproute2: `apt-get install iproute2`, or `dnf install iproute-tc`.",
        )
    return found


def _apply(
    program: str, commands: list[Command], namespace: int, *, hand_over: list[int] | None = None
) -> None:
    """Run commands of `ip` or `tc` in a namespace as one batch; raise if one fails."""
    text = "".join(" ".join(command) + "\n" for command in commands)
    with namespaces.inside(namespace):
        done = subprocess.run(
            [_program(program), "-batch", "-"],
            input=text,
            capture_output=True,
            text=True,
            pass_fds=hand_over or [],
        )
    if done.returncode:
        raise PenstockError(
            f"`{program}` could not set up an emulated network: {' '.join(done.stderr.split())}",
            got=text,
            fix="The kernel may lack a part: veth, bridge and tbf are needed (for a latency: tun).",
        )

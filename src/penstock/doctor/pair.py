"""Pair measurement: two nodes, both directions, over each interface: connection, packets, latency, speed.

Each measurement has its own sockets or group, so a failure affects no other. A dead link is detected by a
failing connection before anything that would hang on it. The timing is that of training over gloo: its
connections, its copies, one stream. Every wait has a limit.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.core.log import EventLog
from penstock.doctor.link import LinkFault, LinkMeasurement
from penstock.doctor.node_group import End, Member, NodeGroup, matched
from penstock.doctor.packet_loss import receive_bursts, send_bursts
from penstock.doctor.path_mtu import LARGEST, largest_arriving

log = EventLog(__name__)

_CONNECT_S, _BURSTS_S = 5.0, 5.0
"""Seconds in which a connection comes about or never, and a burst of packets arrives, however often some are
lost."""


class GlooLine:
    """Gloo group of two over one interface of each; the other node must create one at the same time.

    Args:
        index: 0 on one node, 1 on the other.
        address: address of this node's interface.
    """

    def __init__(self, store: Store, *, index: int, address: str, timeout_s: float) -> None:
        self._wait = timedelta(seconds=timeout_s)
        gloo: Any = ProcessGroupGloo  # torch's stubs lack its options and inherited methods
        options = gloo._Options()
        options._timeout = self._wait
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(store, index, 2, options)
        self._peer = 1 - index

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor.

        Raises:
            RuntimeError: it takes longer than the limit.
        """
        self._group.send([tensor], self._peer, 0).wait(self._wait)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with the data received, and return it; raises as `send`."""
        self._group.recv([tensor], self._peer, 0).wait(self._wait)
        return tensor

    def close(self) -> None:
        """End the group."""
        self._group.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    """Interface of this node that faces one of another."""

    party: NodeGroup
    link: LinkMeasurement
    mine: End
    where: str
    """Prefix of the keys of these two nodes in the store."""
    timeout_s: float

    @contextmanager
    def line(self, purpose: str) -> Iterator[GlooLine]:
        store = PrefixStore(f"{self.where}/{purpose}", self.party.store)
        index = int(self.link.source > self.link.target)
        made = GlooLine(store, index=index, address=self.mine.address, timeout_s=self.timeout_s)
        try:
            yield made
        finally:
            made.close()


def measure_pair(
    party: NodeGroup, other: Member, *, attempt: int, only: Mapping[int, str], timeout_s: float
) -> list[LinkMeasurement]:
    """Measure with another node, which must call this at the same time; return the links this one sends on.

    Args:
        attempt: number of earlier measurements of this pair.
        only: interface of each node; empty: all.
    """
    found = []
    for mine, theirs in matched(party.me.ends, other.ends):
        if only and mine.name != only[party.me.node]:
            continue
        link = LinkMeasurement(
            source=party.me.node,
            target=other.node,
            source_nic=mine.name,
            target_nic=theirs.name,
            packet_bytes=min(mine.mtu, theirs.mtu, LARGEST),
        )
        ends = sorted([(link.source, mine.name), (link.target, theirs.name)])
        where = f"pair{attempt}/" + "-".join(f"{node}.{name}" for node, name in ends)
        crossing = _Crossing(party=party, link=link, mine=mine, where=where, timeout_s=timeout_s)
        found.append(_measure(crossing))
    return found


def _measure(crossing: _Crossing) -> LinkMeasurement:
    link, party = crossing.link, crossing.party
    try:
        lost_share = _connects(crossing)
        if lost_share is None:
            return replace(link, fault=LinkFault.DEAD)
        link = replace(link, lost_share=lost_share)
        link = _with_messages(crossing, link)
        there, back = largest_arriving(
            party, link, crossing.mine.address, where=crossing.where, timeout_s=crossing.timeout_s
        )
        link = replace(link, arriving_bytes=there)
        hangs = link.loses_packets or replace(link, arriving_bytes=back).loses_packets
        return link if hangs else _with_transfers(crossing, link)
    except (PenstockError, RuntimeError, OSError) as error:
        log.debug("link_dead", "Link {link} is dead: {error}", link=link, error=error)
        return replace(link, fault=LinkFault.DEAD)


def _connects(crossing: _Crossing) -> float | None:
    """Return the share of packets lost on this link; None: not both nodes reach each other.

    The lower node sends first. What gets through, gets through within seconds: a dead link must not cost the
    time of the others.
    """
    party, link, where = crossing.party, crossing.link, crossing.where
    address, timeout_s = crossing.mine.address, crossing.timeout_s
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:  # the kernel accepts
        party.say(f"{where}/listens/{link.source}", listening.getsockname()[:2])
        target = party.hear(f"{where}/listens/{link.target}", timeout_s=2 * timeout_s)
        line = _connected(target, address, link, min(timeout_s, _CONNECT_S))
        party.say(f"{where}/reached/{link.source}", line is not None)
        both = bool(party.hear(f"{where}/reached/{link.target}", timeout_s=2 * timeout_s))
        if line is None:
            return None
        with line:
            if not both:
                return None
            return _lost_share(line, listening, sends_first=link.source < link.target)


def _connected(
    target: Sequence[Any], address: str, link: LinkMeasurement, timeout_s: float
) -> socket.socket | None:
    try:
        return socket.create_connection((target[0], target[1]), timeout_s, source_address=(address, 0))
    except OSError as error:
        log.debug("link_unreached", "Link {link} is not reached: {error}", link=link, error=error)
        return None


def _lost_share(line: socket.socket, listening: socket.socket, *, sends_first: bool) -> float:
    """Exchange bursts with the other node, each over the connection that it opened."""
    listening.settimeout(_BURSTS_S)
    line.settimeout(_BURSTS_S)
    share = 0.0
    with suppress(OSError), listening.accept()[0] as theirs:  # a link that passes nothing is found later
        theirs.settimeout(_BURSTS_S)
        for is_mine in (sends_first, not sends_first):
            if is_mine:
                share = send_bursts(line)
            else:
                with suppress(TimeoutError):  # the other node measures that direction
                    receive_bursts(theirs)
    return share


def _with_messages(crossing: _Crossing, link: LinkMeasurement) -> LinkMeasurement:
    """Return the link with its round trip and clock difference; the lower node asks first."""
    first = link.source < link.target
    with crossing.line("ping") as line:
        for mine in (first, not first):
            if mine:
                round_trip_s, ahead_s = ping(line)
            else:
                answer_pings(line)
    return replace(link, round_trip_s=round_trip_s, clock_ahead_s=ahead_s)


def _with_transfers(crossing: _Crossing, link: LinkMeasurement) -> LinkMeasurement:
    """Return the link with its speed; the lower node sends first."""
    first = link.source < link.target
    for purpose, mine in (("up", first), ("down", not first)):
        try:
            with crossing.line(purpose) as line:
                if mine:
                    link = replace(link, gbit_s=send_transfers(line))
                else:
                    receive_transfers(line)
        except RuntimeError as error:
            log.debug("link_stalled", "Link {link} stalls: {error}", link=link, error=error)
            if mine:
                link = replace(link, fault=LinkFault.STALLS)
    return link


_PINGS = 20
_FIRST_BYTES, _MAX_BYTES, _GROWTH = 2**18, 2**26, 4
_LONG_ENOUGH_S = 0.2
_TRIES = 3


def ping(line: GlooLine) -> tuple[float, float]:
    """Return the shortest round trip, and the other clock's lead during it, computed as in NTP."""
    best, ahead = float("inf"), 0.0
    there, back = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        sent, start = clock.unix_seconds(), clock.monotonic()
        line.send(there)
        theirs = float(line.receive(back))
        took = clock.monotonic() - start
        if took < best:
            best, ahead = took, theirs - (sent + took / 2)
    return best, ahead


def answer_pings(line: GlooLine) -> None:
    """Answer the messages of `ping` with the time."""
    there = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        line.receive(there)
        line.send(torch.tensor([clock.unix_seconds()], dtype=torch.float64))


def send_transfers(line: GlooLine) -> float:
    """Send growing messages until one takes long enough; return the best Gbit/s at that size.

    A slow transfer is repeated, so that a busy machine or other traffic does not count as a slow link.
    """
    size, best_s, tries = _FIRST_BYTES, float("inf"), 0
    while True:
        best_s, tries = min(best_s, _timed(line, size)), tries + 1
        if best_s > _LONG_ENOUGH_S or size >= _MAX_BYTES:
            if tries == _TRIES:
                line.send(torch.tensor([0]))
                return size * 8 / best_s / 1e9
        else:
            size, best_s, tries = size * _GROWTH, float("inf"), 0


def receive_transfers(line: GlooLine) -> None:
    """Receive the messages of `send_transfers`."""
    while size := int(line.receive(torch.zeros(1, dtype=torch.int64))):
        line.receive(torch.zeros(size, dtype=torch.uint8))
        line.send(torch.ones(1, dtype=torch.int64))


def _timed(line: GlooLine, size: int) -> float:
    """Send `size` bytes; return the seconds until the other node confirmed their arrival."""
    content = torch.zeros(size, dtype=torch.uint8)
    line.send(torch.tensor([size]))
    start = clock.monotonic()
    line.send(content)
    line.receive(torch.zeros(1, dtype=torch.int64))
    return clock.monotonic() - start

"""Measure one pair of nodes, both ways, over each interface of theirs: reach, packets, messages, transfers.

Each measurement has sockets or a group of its own, so that one that dies takes nothing along. A link that is
dead is found by a connection that does not come about, before anything that would hang on it.
"""

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch._C._distributed_c10d import PrefixStore

from penstock.core.errors import PenstockError
from penstock.doctor.gloo_line import GlooLine, answer, ping, take, transfer
from penstock.doctor.link import Fault, Link
from penstock.doctor.packets import LARGEST, largest_arriving
from penstock.doctor.party import End, Member, Party, matched

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    """One interface of this node that faces one of another."""

    party: Party
    link: Link
    mine: End
    where: str
    """Prefix of what the two say to each other through the store."""
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
    party: Party, other: Member, *, attempt: int, only: Mapping[int, str], timeout_s: float
) -> list[Link]:
    """Measure with another node, which must call this at the same time; return what this one sends.

    Args:
        attempt: how often these two have been measured before.
        only: which interface of each node; empty: all.
    """
    found = []
    for mine, theirs in matched(party.me.ends, other.ends):
        if only and mine.name != only[party.me.node]:
            continue
        link = Link(
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


def _measure(crossing: _Crossing) -> Link:
    link, party = crossing.link, crossing.party
    try:
        if not _connects(crossing):
            return replace(link, fault=Fault.DEAD)
        link = _with_messages(crossing, link)
        there, back = largest_arriving(
            party, link, crossing.mine.address, where=crossing.where, timeout_s=crossing.timeout_s
        )
        link = replace(link, arriving_bytes=there)
        hangs = link.loses_packets or replace(link, arriving_bytes=back).loses_packets
        return link if hangs else _with_transfers(crossing, link)
    except (PenstockError, RuntimeError, OSError) as error:
        log.debug("dead link=%s error=%s", link, error)
        return replace(link, fault=Fault.DEAD)


def _connects(crossing: _Crossing) -> bool:
    """Whether both nodes can open a connection to each other."""
    party, link, where = crossing.party, crossing.link, crossing.where
    address, timeout_s = crossing.mine.address, crossing.timeout_s
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:  # the kernel accepts
        party.say(f"{where}/listens/{link.source}", listening.getsockname()[:2])
        target = party.hear(f"{where}/listens/{link.target}", timeout_s=2 * timeout_s)
        try:
            socket.create_connection(tuple(target), timeout_s, source_address=(address, 0)).close()
            reached = True
        except OSError as error:
            log.debug("unreached link=%s error=%s", link, error)
            reached = False
        party.say(f"{where}/reached/{link.source}", reached)
        return bool(party.hear(f"{where}/reached/{link.target}", timeout_s=2 * timeout_s)) and reached


def _with_messages(crossing: _Crossing, link: Link) -> Link:
    """Return the link with its round trip and the other's clock; the lower node asks first."""
    first = link.source < link.target
    with crossing.line("ping") as line:
        for mine in (first, not first):
            if mine:
                round_trip_s, ahead_s = ping(line)
            else:
                answer(line)
    return replace(link, round_trip_s=round_trip_s, clock_ahead_s=ahead_s)


def _with_transfers(crossing: _Crossing, link: Link) -> Link:
    """Return the link with its speed; the lower node sends first."""
    first = link.source < link.target
    for purpose, mine in (("up", first), ("down", not first)):
        try:
            with crossing.line(purpose) as line:
                if mine:
                    link = replace(link, gbit_s=transfer(line))
                else:
                    take(line)
        except RuntimeError as error:
            log.debug("stalled link=%s error=%s", link, error)
            if mine:
                link = replace(link, fault=Fault.STALLS)
    return link

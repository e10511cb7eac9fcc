"""Membership of an elastic run: nodes of the present round, and nodes that wait for the next one.

A pure state machine: callers give the time.

    gathering   joining nodes are counted; once enough have joined, a last call admits more, then a round
                begins
    running     each member has its number; new nodes wait, and a member that leaves is not replaced
    gathering   again, once the last member has left

One process holds this state and answers every question (server.py), so the clocks of nodes need not agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Entry(Enum):
    """Answer to a node that asks to join."""

    WAIT = "wait"
    """The round is not complete, or the next one has not begun."""
    SPARE = "spare"
    """The round has as many nodes as it may have; this node is let in once one of them is gone."""
    MEMBER = "member"
    """The round is complete, and the node belongs to it."""
    BROKEN = "broken"
    """The round was complete, and a member has left it since: it is not begun."""
    CLOSED = "closed"
    """The run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Request of a node to join."""

    number: int
    """Number of the node in the run; members are in this order."""
    address: str
    """Address of the node, at which the first rank would listen."""
    port: int
    """Free port of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousInfo:
    """Position of a member in the group: it starts its ranks by it."""

    round: int
    index: int
    """Number of the node among the members, from 0."""
    num_nodes: int
    address: str
    """Address of the first member."""
    port: int
    """Free port of the first member, where the ranks of this round meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The run as one of its nodes sees it."""

    num_waiting: int
    """Nodes that the next round would let in."""
    num_present: int
    """Members of this round that have not left or been lost."""


@dataclass(slots=True, kw_only=True)
class Membership:
    """State of a rendezvous.

    Args:
        min_nodes: nodes with which a round begins.
        max_nodes: nodes that it takes.
        last_call_s: seconds for which enough nodes wait for more.
        lost_after_s: silence after which a node is lost.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float
    lost_after_s: float
    round: int = 0
    exit_code: int | None = None
    """Exit code of the run that has ended; None: it goes on."""
    _members: dict[str, NodeOffer] = field(default_factory=dict)
    _waiting: dict[str, NodeOffer] = field(default_factory=dict)
    _infos: dict[str, RendezvousInfo] = field(default_factory=dict)
    """What each member of this round was told; empty: members are still gathering."""
    _heard_at: dict[str, float] = field(default_factory=dict)
    _deadline: float | None = None
    _now: float = 0.0

    def join(self, node: str, offer: NodeOffer, now: float) -> tuple[Entry, RendezvousInfo | None]:
        """Take a node in, or let it wait; it asks again until it is a member.

        It replaces another of its number: a pod that was lost, and is made again.
        """
        self._hear(node, now)
        if self.exit_code is not None:
            return Entry.CLOSED, None
        for other in self._of_number(offer.number) - {node}:
            self._drop(other)
        if node not in self._members:
            self._waiting[node] = offer
        elif not self._infos:
            self._members[node] = offer
        self._gather(now)
        if node in self._infos and node in self._members:  # one that has left it waits for the next round
            if self._members.keys() == self._infos.keys():
                return Entry.MEMBER, self._infos[node]
            self._drop(node)
            self._gather(now)
            return Entry.BROKEN, None
        is_spare = node in self._waiting and len(self._members) >= self.max_nodes
        return Entry.SPARE if is_spare else Entry.WAIT, None

    def heartbeat(self, node: str, now: float) -> View:
        """Note that a node is alive; return the nodes of the run."""
        self._hear(node, now)
        return View(
            num_waiting=min(len(self._waiting), self.max_nodes - len(self._members)),
            num_present=len(self._members),
        )

    def leave(self, node: str, now: float) -> None:
        """Take a node out, whether it is a member or waits."""
        self._hear(node, now)
        self._drop(node)
        self._gather(now)

    def close(self, exit_code: int) -> None:
        """End the run for all; the first code counts."""
        if self.exit_code is None:
            self.exit_code = exit_code

    def _hear(self, node: str, now: float) -> None:
        """Note a sign of life, and drop nodes that gave none for too long.

        If no node was heard for a third of that time, it was this process that did not run: none is dropped.
        """
        if now - self._now > self.lost_after_s / 3:
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._now = self._heard_at[node] = now
        for lost in [one for one, at in self._heard_at.items() if now - at > self.lost_after_s]:
            self._drop(lost)

    def _of_number(self, number: int) -> set[str]:
        known = self._members | self._waiting
        return {node for node, offer in known.items() if offer.number == number}

    def _drop(self, node: str) -> None:
        for kept in (self._members, self._waiting, self._heard_at):
            kept.pop(node, None)
        if self._infos and not self._members:
            self._infos, self.round = {}, self.round + 1

    def _gather(self, now: float) -> None:
        if self._infos:
            return
        for node in sorted(self._waiting, key=lambda one: _order(one, self._waiting)):
            if len(self._members) < self.max_nodes:
                self._members[node] = self._waiting.pop(node)
        if len(self._members) < self.min_nodes:
            self._deadline = None
            return
        if self._deadline is None:
            self._deadline = now + self.last_call_s
        if len(self._members) < self.max_nodes and now < self._deadline:
            return
        self._deadline = None
        ordered = sorted(self._members, key=lambda one: _order(one, self._members))
        first = self._members[ordered[0]]
        self._infos = {
            node: RendezvousInfo(
                round=self.round,
                index=index,
                num_nodes=len(ordered),
                address=first.address,
                port=first.port,
            )
            for index, node in enumerate(ordered)
        }


def _order(node: str, offers: Mapping[str, NodeOffer]) -> tuple[int, str]:
    return offers[node].number, node

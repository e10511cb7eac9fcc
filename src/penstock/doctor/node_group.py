"""Node group: the nodes examined together, and the schedule of pairs that measure at the same time.

A collective of all ranks fails with one link. So common data goes through the store: which nodes are present,
whose turn it is, and the results. A node that does not come, or stops answering, becomes a line of the
report.
"""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store  # typed there only

from penstock.core import clock, env
from penstock.core.errors import PenstockError
from penstock.core.network.nics import Nic, usable


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Interface of a node, as announced to the others."""

    name: str
    address: str
    network: str
    """Network of the address, such as "10.0.0.0/24"."""
    mtu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Node that is present."""

    node: int
    host: str
    ends: tuple[End, ...]
    """Interfaces that are measured."""

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


LOOPBACK = End(name="lo", address="127.0.0.1", network="127.0.0.0/8", mtu=65535)


def ends_of(nics: Sequence[Nic], *, num_nodes: int) -> tuple[End, ...]:
    """Return the interfaces to measure on a node; processes of one machine use its loopback."""
    if num_nodes == 1:
        return (LOOPBACK,)
    return tuple(
        End(name=nic.name, address=nic.address, network=nic.networks[0], mtu=nic.mtu) for nic in usable(nics)
    )


def matched(mine: Sequence[End], theirs: Sequence[End]) -> list[tuple[End, End]]:
    """Return the pairs of interfaces of two nodes: those in one network, else in their order.

    >>> a, b = (End(name=f"eth{i}", address="", network=f"10.0.{i}.0/24", mtu=1500) for i in (0, 1))
    >>> [(mine.name, theirs.name) for mine, theirs in matched([a, b], [b])]
    [('eth1', 'eth1')]
    """
    shared = [(one, other) for one in mine for other in theirs if one.network == other.network]
    return shared or list(zip(mine, theirs, strict=False))


class NodeGroup:
    """Group of nodes, seen from one of them. Rank 0's node has number 0 and coordinates the turns."""

    def __init__(self, store: Store, me: Member, *, num_expected: int) -> None:
        self.store = PrefixStore("doctor", store)
        self.me = me
        self.members: list[Member] = []
        self.missing: list[int] = []
        self._num_expected = num_expected
        self._awaited = [*range(num_expected)]
        """Nodes that the leading node waits for."""

    @property
    def leads(self) -> bool:
        """True if this node coordinates the turns and writes the report."""
        return self.me.node == 0

    def gather(self, *, timeout_s: float) -> None:
        """Announce this node and learn the others, until all are present or the time is over."""
        self.say(f"here/{self.me.node}", asdict(self.me))
        if self.leads:
            self.say("members", self._arrivals("here", timeout_s=timeout_s))
        members = self.hear("members", timeout_s=2 * timeout_s)
        self.members = [_member(self.hear(f"here/{node}", timeout_s=timeout_s)) for node in members]
        self.missing = [node for node in range(self._num_expected) if node not in members]

    def take_turns(
        self, num_turns: int, turn: Callable[[int], None], *, attempt: int, bound_s: float, slow_s: float
    ) -> int:
        """Take turns together until the time is over; return the number of turns.

        Args:
            attempt: distinguishes these turns from those of an earlier call.
            bound_s: no turn but the first begins later than this.
            slow_s: time limit of one turn; slower nodes are not waited for.
        """
        start = clock.monotonic()
        for number in range(num_turns):
            go, done = f"go{attempt}/{number}", f"done{attempt}/{number}"
            if self.leads:
                self.say(go, number == 0 or clock.monotonic() - start < bound_s)
            if not self.hear(go, timeout_s=2 * slow_s):
                return number
            turn(number)
            self.say(f"{done}/{self.me.node}", True)
            if self.leads:
                self._arrivals(done, timeout_s=slow_s)
        return num_turns

    def exchange(self, kind: str, mine: Any, *, timeout_s: float) -> dict[int, Any]:  # Any: what JSON holds
        """Share a value with all nodes; return the values of all that answered, the same on every node."""
        self.say(f"{kind}/{self.me.node}", mine)
        if self.leads:
            self.say(f"all-{kind}", self._arrivals(kind, timeout_s=timeout_s))
        nodes = self.hear(f"all-{kind}", timeout_s=2 * timeout_s)
        return {node: self.hear(f"{kind}/{node}", timeout_s=timeout_s) for node in nodes}

    def leave(self, *, timeout_s: float) -> None:
        """End together: the store ends with the leading node."""
        self.say(f"left/{self.me.node}", True)
        if self.leads:
            self._arrivals("left", timeout_s=timeout_s)

    def say(self, key: str, value: Any) -> None:
        """Write a value to the store."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str, *, timeout_s: float) -> Any:
        """Return a value of the store once it is there.

        Raises:
            PenstockError: it does not appear in time.
        """
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
            return json.loads(self.store.get(key))
        except RuntimeError:
            raise PenstockError(
                f"{self.me} waited {timeout_s:.0f} s for the others without an answer (for {key!r})",
                fix="See their output; the report of the first node names those that did not come.",
            ) from None

    def _arrivals(self, kind: str, *, timeout_s: float) -> list[int]:
        """Return the nodes that wrote a value of a kind, once all have or the time is over.

        A node that did not is not waited for again: a killed node costs the others one time limit.
        """
        try:
            self.store.wait([f"{kind}/{node}" for node in self._awaited], timedelta(seconds=timeout_s))
        except RuntimeError:  # some nodes did not answer
            self._awaited = [node for node in self._awaited if self.store.check([f"{kind}/{node}"])]
        return self._awaited


def host_name() -> str:
    """Return this machine's name; in a pod, that of its node where the manifest tells it."""
    return env.variable("PENSTOCK_NODE") or socket.gethostname()


def _member(raw: dict[str, Any]) -> Member:
    return Member(node=raw["node"], host=raw["host"], ends=tuple(End(**end) for end in raw["ends"]))


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs by the circle method: each node meets each other once.

    The first member of a pair is the lower one. With an odd number of nodes, one pauses in each round.


    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats: list[int | None] = [*range(num_nodes)]
    if num_nodes % 2:
        seats.append(None)
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found

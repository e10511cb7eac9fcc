"""The nodes that are examined together: they meet at one store, and never in one collective.

A collective of all ranks dies with one link. So what is common to all goes through the store: who is there,
whose turn it is, what was found. A node that does not come, or stops answering, is a line of the report.
"""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore  # typed there only

from penstock.core import clock, env
from penstock.core.errors import PenstockError, UsageError
from penstock.launch.nics import Nic, usable


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One interface of a node, as the others must know it."""

    name: str
    address: str
    network: str
    """That the address lies in, such as "10.0.0.0/24"."""
    mtu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node that came."""

    node: int
    host: str
    ends: tuple[End, ...]
    """The interfaces that are measured."""

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


LOOPBACK = End(name="lo", address="127.0.0.1", network="127.0.0.0/8", mtu=65535)


def ends_of(nics: Sequence[Nic], *, num_nodes: int) -> tuple[End, ...]:
    """Return the interfaces over which a node is measured; the processes of one machine use its loopback."""
    if num_nodes == 1:
        return (LOOPBACK,)
    return tuple(
        End(name=nic.name, address=nic.address, network=nic.networks[0], mtu=nic.mtu) for nic in usable(nics)
    )


def matched(mine: Sequence[End], theirs: Sequence[End]) -> list[tuple[End, End]]:
    """Return which interfaces of two nodes face each other: those in one network, else in their order.

    >>> a, b = (End(name=f"eth{i}", address="", network=f"10.0.{i}.0/24", mtu=1500) for i in (0, 1))
    >>> [(mine.name, theirs.name) for mine, theirs in matched([a, b], [b])]
    [('eth1', 'eth1')]
    """
    shared = [(one, other) for one in mine for other in theirs if one.network == other.network]
    return shared or list(zip(mine, theirs, strict=False))


def open_store(who: env.Ranks, *, timeout_s: float) -> Store:
    """Return the store where the ranks meet; the first keeps it, unless torchrun does.

    Raises:
        UsageError: several ranks, and nothing says where they meet.
        PenstockError: the store does not answer.
    """
    wait = timedelta(seconds=timeout_s)
    where = env.rendezvous()
    if who.world_size == 1:
        return HashStore()
    if where.startswith("file://"):
        return FileStore(where.removeprefix("file://"), who.world_size)
    meeting = env.meeting()
    if meeting is None:
        raise UsageError(
            f"{who.world_size} ranks, and no MASTER_ADDR and MASTER_PORT to meet at",
            fix="Start them with torchrun, or with penstock doctor --processes.",
        )
    keeps = who.rank == 0 and not meeting.is_kept
    try:
        return TCPStore(
            meeting.address, meeting.port, None, keeps, wait, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError:
        raise PenstockError(
            f"Rank {who.rank} does not reach the first rank at {meeting.address}:{meeting.port} "
            f"within {timeout_s:.0f} s",
            fix="Check that rank 0 runs, the route to that address, and the firewall for that port.",
        ) from None


class Party:
    """The nodes, as one of them sees it. Rank 0's node is number 0 and calls the turns."""

    def __init__(self, store: Store, me: Member, *, num_expected: int) -> None:
        self.store = PrefixStore("doctor", store)
        self.me = me
        self.members: list[Member] = []
        self.missing: list[int] = []
        self._num_expected = num_expected
        self._awaited = [*range(num_expected)]
        """Whom the leading node waits for."""

    @property
    def leads(self) -> bool:
        """Whether this node calls the turns and writes the report."""
        return self.me.node == 0

    def gather(self, *, timeout_s: float) -> None:
        """Say that this node is here; learn who else is, once all are or the time is over."""
        self.say(f"here/{self.me.node}", asdict(self.me))
        if self.leads:
            self.say("members", self._arrivals("here", timeout_s=timeout_s))
        members = self.hear("members", timeout_s=2 * timeout_s)
        self.members = [_member(self.hear(f"here/{node}", timeout_s=timeout_s)) for node in members]
        self.missing = [node for node in range(self._num_expected) if node not in members]

    def take_turns(
        self, num_turns: int, turn: Callable[[int], None], *, attempt: int, bound_s: float, slow_s: float
    ) -> int:
        """Take turns together until the time is over; return how many were taken.

        Args:
            attempt: tells these turns from those of an earlier call.
            bound_s: no turn but the first begins later than this.
            slow_s: what one turn may take at most; who takes longer is not waited for.
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
        """Give something to all nodes; return what came of each, the same on every node."""
        self.say(f"{kind}/{self.me.node}", mine)
        if self.leads:
            self.say(f"all-{kind}", self._arrivals(kind, timeout_s=timeout_s))
        nodes = self.hear(f"all-{kind}", timeout_s=2 * timeout_s)
        return {node: self.hear(f"{kind}/{node}", timeout_s=timeout_s) for node in nodes}

    def leave(self, *, timeout_s: float) -> None:
        """End together: the store goes with the leading node."""
        self.say(f"left/{self.me.node}", True)
        if self.leads:
            self._arrivals("left", timeout_s=timeout_s)

    def say(self, key: str, value: Any) -> None:
        """Put a value where all can read it."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str, *, timeout_s: float) -> Any:
        """Return a value once it is there.

        Raises:
            PenstockError: it does not come.
        """
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
            return json.loads(self.store.get(key))
        except RuntimeError:
            raise PenstockError(
                f"{self.me} waited {timeout_s:.0f} s for the others in vain (for {key!r})",
                fix="See what they said; the report of the first node names who did not come.",
            ) from None

    def _arrivals(self, kind: str, *, timeout_s: float) -> list[int]:
        """Return which nodes said something of a kind, once all have or the time is over.

        Who did not is not waited for again: a node that was killed costs the others one time limit.
        """
        try:
            self.store.wait([f"{kind}/{node}" for node in self._awaited], timedelta(seconds=timeout_s))
        except RuntimeError:  # not all came
            self._awaited = [node for node in self._awaited if self.store.check([f"{kind}/{node}"])]
        return self._awaited


def host_name() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def _member(raw: dict[str, Any]) -> Member:
    return Member(node=raw["node"], host=raw["host"], ends=tuple(End(**end) for end in raw["ends"]))

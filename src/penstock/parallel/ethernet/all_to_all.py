"""All-to-all by point-to-point messages between the ranks of a group, on gloo.

Gloo's tcp sends a message once its receiver has announced the receive. Its collectives send first and
announce later, so announcements queue behind data, and one direction of a link waits for the other: on a
traffic-shaped card an all-to-all took 2.1 times bytes / bandwidth. Here all receives of an operation are
announced before its sends: 1.04 times (measured by hand at 500 Mbit/s).

Messages between two ranks with one tag are matched in the order in which both start them, which is equal on
all ranks. The tag also selects the network card: the next one of GLOO_SOCKET_IFNAME for each.

The flight recorder does not include gloo's messages, so `MESSAGES` counts what is sent and waited for.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from penstock.core.env import local_world_size

MAX_RANKS = 32
"""Largest group that uses messages: each rank has as many in flight; a ring has two."""


class PeerMessages:
    """Counts this process's messages, and records what it waits for."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        """Bytes sent, by the name of the process group."""
        self.num_begun = 0
        """Number of operations of all groups."""
        self.waited_for = ""
        """Operation that is waited for now; "": none."""

    def begin(self, group: dist.ProcessGroup, num_bytes: int) -> int:
        """Count an operation that sends `num_bytes`; return its number."""
        self.sent_bytes[str(group.group_name)] += num_bytes
        self.num_begun += 1
        return self.num_begun

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Context manager: `what` is being waited for, for hang reports."""
        self.waited_for = what
        try:
            yield
        finally:
            self.waited_for = ""


MESSAGES = PeerMessages()
"""Messages of this process."""


class Messaged(dist.Work):
    """The messages of one operation, in flight.

    Args:
        name: description for hang reports.
    """

    def __init__(self, name: str, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._name, self._works = name, list(works)

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - as torch calls it
        """Wait until all messages have arrived, and the sent tensors may be changed."""
        with MESSAGES.waiting_for(self._name):
            for work in self._works:
                work.wait()
        self._works.clear()
        return True


def can_gather(group: dist.ProcessGroup) -> bool:
    """Return True if gathers should use messages: not where several machines have several ranks each, because
    a ring sends a shard to a machine once, and messages to each of its ranks.
    """
    ranks, machine = dist.get_process_group_ranks(group), local_world_size()
    num_machines = len({rank // machine for rank in ranks})
    return can_exchange(group) and num_machines in (1, len(ranks))


def can_exchange(group: dist.ProcessGroup) -> bool:
    """Return True if exchanges should use messages: they send the same as the collective."""
    return group.size() <= MAX_RANKS and "gloo" in dist.get_backend(group)


def begin_messages(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup, *, name: str, tag: int
) -> dist.Work:
    """Start sending item i of `sent` to rank i, and receiving item i of `received` from it.

    Args:
        name: description for hang reports.
        tag: message tag; equal on all ranks.
    """
    here, size = group.rank(), group.size()
    distances = range(1, size)
    receives = [
        dist.irecv(received[other], group=group, group_src=other, tag=tag)
        for other in ((here - distance) % size for distance in distances)
    ]
    sends = [
        dist.isend(sent[other], group=group, group_dst=other, tag=tag)
        for other in ((here + distance) % size for distance in distances)
    ]
    num_bytes = sum(x.nbytes for i, x in enumerate(sent) if i != here)
    number = MESSAGES.begin(group, num_bytes)
    received[here].copy_(sent[here])
    return Messaged(f"{name} of {group.group_desc} (messages {number})", [*_all(receives), *_all(sends)])


def _all(works: Sequence[dist.Work | None]) -> Iterator[dist.Work]:
    for work in works:
        assert work is not None, "torch returns None to ranks outside of a group"
        yield work

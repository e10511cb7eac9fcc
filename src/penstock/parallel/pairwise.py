"""What every rank of a group sends to every other, as messages from rank to rank, on gloo.

Gloo's tcp sends a message once its receiver has announced that it waits for it. Its collectives send first
and announce then, so that announcements queue behind data, and of a link's two directions one waits for the
other: on a shaped NIC an all-to-all took 2.1 times the bytes over the speed. Here all receives of an
operation are announced before any of its sends: 1.04 times (both measured by hand, at 500 Mbit/s).

Messages of two ranks that bear one tag are matched in the order in which both began them, which is equal on
all ranks. The tag also picks the network card: the next of GLOO_SOCKET_IFNAME for each.

The flight recorder has no messages of gloo, so what is sent and waited for is kept in `MESSAGES`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from penstock.core.env import local_world_size

MOST_RANKS = 32
"""Of a group whose ranks write to each other. Each has as many messages under way at once; a ring has two."""


class Messages:
    """What this process sent in messages, and what it waits for."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        """By the name of the process group."""
        self.num_begun = 0
        """Operations of all groups."""
        self.waited_for = ""
        """What it waits for now; "": nothing."""

    def begin(self, group: dist.ProcessGroup, num_bytes: int) -> int:
        """Count an operation that sends so much; return its number."""
        self.sent_bytes[str(group.group_name)] += num_bytes
        self.num_begun += 1
        return self.num_begun

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Say what is waited for inside, for who asks while the process hangs there."""
        self.waited_for = what
        try:
            yield
        finally:
            self.waited_for = ""


MESSAGES = Messages()
"""Those of this process."""


class Messaged(dist.Work):
    """The messages of an operation, under way.

    Args:
        name: what they are, for people.
    """

    def __init__(self, name: str, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._name, self._works = name, list(works)

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - as torch calls it
        """Wait until all have arrived, and what was sent may be written to."""
        with MESSAGES.waiting_for(self._name):
            for work in self._works:
                work.wait()
        self._works.clear()
        return True


def can_gather(group: dist.ProcessGroup) -> bool:
    """Return whether to gather by messages: not where several machines have several ranks each. A ring brings
    a shard to a machine once, messages bring it to each of its ranks.
    """
    ranks, machine = dist.get_process_group_ranks(group), local_world_size()
    num_machines = len({rank // machine for rank in ranks})
    return can_exchange(group) and num_machines in (1, len(ranks))


def can_exchange(group: dist.ProcessGroup) -> bool:
    """Return whether to exchange by messages: what is sent where is the same as in the collective."""
    return group.size() <= MOST_RANKS and "gloo" in dist.get_backend(group)


def begin_messages(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup, *, name: str, tag: int
) -> dist.Work:
    """Begin to send item i of `sent` to rank i of a group, and to receive item i of `received` from it.

    Args:
        name: what this is, for people.
        tag: of the messages; equal on all ranks.
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
        assert work is not None, "torch gives None to ranks outside of a group"
        yield work

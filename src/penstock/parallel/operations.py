"""Collectives begun and not waited for, each cut into as many operations as there are network cards.

Gloo sends an operation through one card: the next operation takes the next of those in GLOO_SOCKET_IFNAME.
So one collective that is waited for uses one card however many there are; cut in two, both. Among few ranks,
gathers and exchanges are messages from rank to rank (pairwise.py), which do not wait for each other.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.blocked import waiting
from penstock.parallel.codecs import decode
from penstock.parallel.encoded_size import CodecName
from penstock.parallel.encoder import Encoder
from penstock.parallel.fsdp_private import DefaultAllGather
from penstock.parallel.pairwise import begin_messages, can_exchange, can_gather

_gather_whole = DefaultAllGather()  # torch has renamed the collective; FSDP2 knows its own torch's name

LEAST = 1 << 16
"""Numbers of an operation, at least: below, another message costs more than another card saves."""


def pieces(size: int, *, operations: int, least: int) -> list[slice]:
    """Cut `size` numbers for several operations.

    >>> pieces(10, operations=3, least=2)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    >>> pieces(10, operations=3, least=100)
    [slice(0, 10, None)]
    """
    each = max(-(-size // operations), min(least, size), 1)
    return [slice(first, min(first + each, size)) for first in range(0, size, each)]


class UnderWay(dist.Work):
    """Operations that together are one; FSDP2 waits for what is a `Work`, and for nothing else.

    Args:
        works: in the order in which they were begun.
        arrived: called once, when all have been waited for, before anyone uses the result.
    """

    def __init__(self, works: Sequence[dist.Work], arrived: Callable[[], None]) -> None:
        super().__init__()
        self._works, self._arrived = list(works), arrived
        self._is_done = False

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - as torch calls it
        """Wait for all of it; again, for nothing."""
        if not self._is_done:
            self._is_done = True
            wait_for(self._works)
            self._arrived()
            self._works.clear()
        return True


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait for operations, and count the time as blocked."""
    with waiting():
        for work in works:
            work.wait()


def begin_gather(
    output: Tensor, here: Tensor, group: dist.ProcessGroup, *, operations: int
) -> list[dist.Work]:
    """Begin to gather what ranks have, [n], into [ranks * n] on each."""
    cuts = pieces(len(here), operations=operations, least=LEAST)
    rows = output.view(group.size(), -1)
    if can_gather(group):
        return [
            begin_messages([here[cut]] * len(rows), [row[cut] for row in rows], group, name="gather", tag=tag)
            for tag, cut in enumerate(cuts)
        ]
    if len(cuts) < 2:
        return [_begun(_gather_whole(output, here, group, async_op=True))]
    return [
        _begun(dist.all_gather([row[cut] for row in rows], here[cut], group=group, async_op=True))
        for cut in cuts
    ]


class Exchanged(NamedTuple):
    """A piece of what all ranks send to one, under way."""

    work: dist.Work
    where: slice
    """Of the numbers of one rank."""
    received: Tensor
    """[ranks, bytes of the piece], once it has arrived."""

    def numbers(self, codec: CodecName) -> Tensor:
        """Return what was received, [ranks, piece] float32."""
        return decode(self.received, codec, size=self.where.stop - self.where.start)


def begin_exchange(
    given: Tensor, group: dist.ProcessGroup, *, operations: int, encoder: Encoder
) -> list[Exchanged]:
    """Begin to give rank i row i of `given`, [ranks, n]."""
    exchanged = []
    for tag, where in enumerate(pieces(given.shape[1], operations=operations, least=LEAST)):
        sent = encoder.encode(given[:, where], where, of=given.shape[1])
        received = torch.empty_like(sent)
        exchanged.append(Exchanged(_exchange(sent, received, group, tag), where, received))
    return exchanged


def _exchange(sent: Tensor, received: Tensor, group: dist.ProcessGroup, tag: int) -> dist.Work:
    if sent.device.type == "cpu" and can_exchange(group):  # a group may have gloo for CPUs and NCCL for GPUs
        return begin_messages(sent.unbind(), received.unbind(), group, name="reduction", tag=tag)
    return _begun(dist.all_to_all_single(received, sent, group=group, async_op=True))


def begin_sum(x: Tensor, group: dist.ProcessGroup, *, operations: int) -> list[dist.Work]:
    """Begin to sum `x`, [n], over the ranks, in place."""
    cuts = pieces(len(x), operations=operations, least=LEAST)
    return [_begun(dist.all_reduce(x[cut], group=group, async_op=True)) for cut in cuts]


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "torch gives None to ranks outside of a group"
    return work

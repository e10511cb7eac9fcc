"""Asynchronous collectives, each split into as many operations as there are network cards.

Gloo sends an operation through one card, and the next operation through the next one of GLOO_SOCKET_IFNAME.
So a single collective uses one card only; split in two, it uses two. In small groups, gathers and exchanges
are messages between ranks (all_to_all.py), which do not wait for each other.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.ethernet.all_to_all import begin_messages, can_exchange, can_gather
from penstock.parallel.ethernet.codecs import Encoder, decode
from penstock.parallel.ethernet.wire_size import CodecName
from penstock.parallel.exposed_comm import waiting
from penstock.parallel.sharding.fsdp_private import DefaultAllGather

_gather_whole = DefaultAllGather()  # torch renamed the collective; FSDP2 knows the right name

LEAST = 1 << 16
"""Minimum numbers per operation: below, another message costs more than another card saves."""


def pieces(size: int, *, operations: int, least: int) -> list[slice]:
    """Split `size` numbers into at most `operations` slices.

    >>> pieces(10, operations=3, least=2)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    >>> pieces(10, operations=3, least=100)
    [slice(0, 10, None)]
    """
    each = max(-(-size // operations), min(least, size), 1)
    return [slice(first, min(first + each, size)) for first in range(0, size, each)]


class PendingCollective(dist.Work):
    """Several operations as one `Work`, which is what FSDP2 waits for.

    Args:
        works: in the order in which they were started.
        arrived: called once after all have completed, before the result is used.
    """

    def __init__(self, works: Sequence[dist.Work], arrived: Callable[[], None]) -> None:
        super().__init__()
        self._works, self._arrived = list(works), arrived
        self._is_done = False

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - as torch calls it
        """Wait for all operations; later calls return at once."""
        if not self._is_done:
            self._is_done = True
            wait_for(self._works)
            self._arrived()
            self._works.clear()
        return True


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait for operations; the time counts as blocked."""
    with waiting():
        for work in works:
            work.wait()


def begin_gather(
    output: Tensor, here: Tensor, group: dist.ProcessGroup, *, operations: int
) -> list[dist.Work]:
    """Start gathering the ranks' tensors, [n], into [ranks * n] on each."""
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


class PendingExchange(NamedTuple):
    """A piece of an exchange in flight: what all ranks send to this one."""

    work: dist.Work
    where: slice
    """Slice of one rank's numbers."""
    received: Tensor
    """[ranks, bytes of the piece], once received."""

    def numbers(self, codec: CodecName) -> Tensor:
        """Return the received numbers, [ranks, piece] float32."""
        return decode(self.received, codec, size=self.where.stop - self.where.start)


def begin_exchange(
    given: Tensor, group: dist.ProcessGroup, *, operations: int, encoder: Encoder
) -> list[PendingExchange]:
    """Start sending row i of `given`, [ranks, n], to rank i."""
    exchanged = []
    for tag, where in enumerate(pieces(given.shape[1], operations=operations, least=LEAST)):
        sent = encoder.encode(given[:, where], where, of=given.shape[1])
        received = torch.empty_like(sent)
        exchanged.append(PendingExchange(_exchange(sent, received, group, tag), where, received))
    return exchanged


def _exchange(sent: Tensor, received: Tensor, group: dist.ProcessGroup, tag: int) -> dist.Work:
    if sent.device.type == "cpu" and can_exchange(group):  # a group may have gloo for CPUs, NCCL for GPUs
        return begin_messages(sent.unbind(), received.unbind(), group, name="reduction", tag=tag)
    return _begun(dist.all_to_all_single(received, sent, group=group, async_op=True))


def begin_sum(x: Tensor, group: dist.ProcessGroup, *, operations: int) -> list[dist.Work]:
    """Start summing `x`, [n], over the ranks, in place."""
    cuts = pieces(len(x), operations=operations, least=LEAST)
    return [_begun(dist.all_reduce(x[cut], group=group, async_op=True)) for cut in cuts]


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "torch returns None to ranks outside of a group"
    return work

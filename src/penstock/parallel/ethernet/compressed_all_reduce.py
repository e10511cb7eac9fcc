"""Asynchronous mean of a tensor over ranks, optionally compressed.

        begin    every rank sends to each other rank the part of its numbers that the other averages
        turn     each rank averages what it received, in float32, and sends the mean to all
        result   the concatenated means: bit-identical on every rank

Each number is sent 2 (n - 1) / n times, as in a ring all-reduce, in any encoding. A compressed sum around a
ring would be rounded at every rank; here it is rounded twice.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from penstock.parallel.ethernet.codecs import Encoder, decode
from penstock.parallel.ethernet.wire_size import CodecName
from penstock.parallel.exposed_comm import waiting
from penstock.parallel.sharding.fsdp_private import DefaultAllGather

_gather_whole = DefaultAllGather()  # torch renamed the collective; FSDP2 knows the right name


class MeanExchange:
    """One mean over the ranks of a group; the constructor starts the exchange.

    Args:
        mine: [n] float32, this rank's numbers; equally many on every rank. Not changed before `turn`.
        group: its ranks all start and turn their exchanges in the same order.
        encoders: for the numbers and for their mean, with error feedback to the next exchange.
    """

    def __init__(
        self,
        mine: Tensor,
        group: dist.ProcessGroup,
        codec: CodecName,
        *,
        encoders: tuple[Encoder, Encoder] | None = None,
    ) -> None:
        self._group, self._codec, self._size = group, codec, mine.numel()
        first, self._second = encoders or (Encoder(codec), Encoder(codec))
        ranks = group.size()
        self._part = -(-self._size // ranks)
        padded = functional.pad(mine, (0, self._part * ranks - self._size))
        self._sent = first.encode(padded.view(ranks, self._part))
        self._received = torch.empty_like(self._sent)
        self._work: dist.Work | None = dist.all_to_all_single(
            self._received, self._sent, group=group, async_op=True
        )
        self._has_turned = False

    def turn(self) -> None:
        """Average what was received and send it back; waits for the first half. Idempotent."""
        if self._has_turned:
            return
        self._wait()
        mean = decode(self._received, self._codec, size=self._part).mean(0, keepdim=True)
        self._sent = self._second.encode(mean).view(-1)
        received = self._received.view(-1)
        self._work = _gather_whole(received, self._sent, self._group, async_op=True)
        self._has_turned = True

    def result(self) -> Tensor:
        """Return the mean [n] float32; waits for it, and calls `turn` if needed."""
        self.turn()
        self._wait()
        return decode(self._received, self._codec, size=self._part).flatten()[: self._size]

    def _wait(self) -> None:
        if self._work is not None:
            with waiting():
                self._work.wait()
            self._work = None

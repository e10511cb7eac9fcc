"""The mean of a tensor over ranks, in few bits if asked, on its way while the ranks do other things.

    begin    every rank sends each other one the part of its numbers which that one averages
    turn     it averages what came, in float32, and sends the mean to all
    result   the means, put together: the same bits on every rank

Each number is sent 2 (n - 1) / n times, as by a ring's all-reduce, in whatever encoding; a sum in few bits
that goes around a ring would be rounded at every stop. Here it is rounded twice.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from penstock.parallel.blocked import waiting
from penstock.parallel.codecs import decode
from penstock.parallel.encoded_size import CodecName
from penstock.parallel.encoder import Encoder
from penstock.parallel.fsdp_private import DefaultAllGather

_gather_whole = DefaultAllGather()  # torch has renamed the collective; FSDP2 knows its own torch's name


class MeanExchange:
    """One mean over the ranks of a group; constructing it begins the exchange.

    Args:
        mine: [n] float32, this rank's numbers; as many on every rank. Kept until `turn`.
        group: whose ranks all begin their exchanges, and turn them, in one order.
        encoders: of the numbers and of their mean, which keep what rounding leaves out for the next exchange.
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
        """Average what came and send it back; waits for the first half. A second call does nothing."""
        if self._has_turned:
            return
        self._wait()
        mean = decode(self._received, self._codec, size=self._part).mean(0, keepdim=True)
        self._sent = self._second.encode(mean).view(-1)
        received = self._received.view(-1)
        self._work = _gather_whole(received, self._sent, self._group, async_op=True)
        self._has_turned = True

    def result(self) -> Tensor:
        """Return the mean [n] float32; waits for it, and turns first if that was not done."""
        self.turn()
        self._wait()
        return decode(self._received, self._codec, size=self._part).flatten()[: self._size]

    def _wait(self) -> None:
        if self._work is not None:
            with waiting():
                self._work.wait()
            self._work = None

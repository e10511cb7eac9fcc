"""Sums of gradients over the copies of a rank's shards, begun one after the other and waited for together."""

import torch.distributed as dist
from torch import Tensor

from penstock.parallel.encoder import Encoders
from penstock.parallel.exchange import MeanExchange
from penstock.parallel.operations import begin_sum, wait_for


class Agreements:
    """The sums that are under way.

    Args:
        copies: ranks that hold the same shards; None: each shard is on one rank, and there is nothing to do.
        operations: that a sum in float32 is cut into.
    """

    def __init__(self, copies: dist.ProcessGroup | None, *, operations: int) -> None:
        self.copies, self._operations = copies, operations
        self._sums: list[dist.Work] = []
        self._exchanges: list[tuple[Tensor, MeanExchange]] = []

    def begin(self, x: Tensor, encoders: Encoders) -> None:
        """Begin to sum `x`, [n], in place, in the bits of its unit's encoders."""
        if self.copies is None:
            return
        if encoders.codec == "float32":
            self._sums += begin_sum(x, self.copies, operations=self._operations)
            return
        both = (encoders.copies, encoders.mean)
        self._exchanges.append((x, MeanExchange(x, self.copies, encoders.codec, encoders=both)))

    def finish(self) -> None:
        """Wait for all of them."""
        wait_for(self._sums)
        for _, exchange in self._exchanges:
            exchange.turn()
        for x, exchange in self._exchanges:
            assert self.copies is not None
            x.copy_(exchange.result()).mul_(self.copies.size())
        self.forget()

    def forget(self) -> None:
        """Leave out what is under way: nobody will read it."""
        self._sums.clear()
        self._exchanges.clear()

"""Gathers of sharded parameters that return before they are done; what is in flight is counted."""

import torch.distributed as dist
from torch import Tensor

from penstock.parallel.fsdp_private import DefaultAllGather
from penstock.parallel.gather_window import Ledger
from penstock.parallel.operations import UnderWay, begin_gather


class GatherBehind(DefaultAllGather):
    """FSDP2's gather, cut into operations and waited for when the result is needed.

    Args:
        operations: of one gather.
        ledger: where bytes under way are counted.
    """

    def __init__(self, *, operations: int, ledger: Ledger) -> None:
        self._operations, self._ledger = operations, ledger

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` of every rank; the result is there after `wait`."""
        size = output_tensor.nbytes
        self._ledger.begin(size)
        works = begin_gather(output_tensor, input_tensor, group, operations=self._operations)
        under_way = UnderWay(works, lambda: self._ledger.end(size))
        if not async_op:
            under_way.wait()
        return under_way

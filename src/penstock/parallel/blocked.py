"""Count the seconds that this process blocks on FSDP's gathers and reductions.

On a CPU a collective of FSDP2 blocks who calls it, so the time of the call is communication that nothing
hides. On a GPU the call only queues it: there, nothing is counted.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from penstock.core import clock


class Blocked:
    """Seconds blocked so far."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return them."""
        return self._seconds

    def add(self, seconds: float) -> None:
        """Count more."""
        self._seconds += seconds


def count_blocked(model: nn.Module) -> Blocked:
    """Make a model that is sharded on a CPU count how long its collectives block; return the counter."""
    blocked = Blocked()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_AllGather(blocked))
            module.set_custom_reduce_scatter(_ReduceScatter(blocked))
    return blocked


class _AllGather(DefaultAllGather):
    def __init__(self, blocked: Blocked) -> None:
        self._blocked = blocked

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        start = clock.monotonic()
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        self._blocked.add(clock.monotonic() - start)
        return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, blocked: Blocked) -> None:
        self._blocked = blocked

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        start = clock.monotonic()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._blocked.add(clock.monotonic() - start)
        return work

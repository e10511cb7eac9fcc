"""Blocked time of FSDP2's gathers and reductions on CPUs, measured around the calls.

The collectives of parallel/ethernet measure their waits themselves.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.core import clock
from penstock.parallel.exposed_comm import BLOCKED, Blocked, waiting
from penstock.parallel.sharding.fsdp import ReduceWhole
from penstock.parallel.sharding.fsdp_private import DefaultAllGather, DefaultReduceScatter, units_of


def count_blocked(model: nn.Module, *, num_shards: int) -> Blocked:
    """Make a model sharded by FSDP2 on a CPU measure the blocked time of its collectives; return the counter.

    Args:
        num_shards: ranks that share its parameters; 1: not sharded.
    """
    for unit in units_of(model):
        if unit.waits_in_gathers:
            unit.module.set_custom_all_gather(_AllGather())
        if unit.waits_in_reductions:
            reduction = _ReduceScatter() if num_shards > 1 else _Reduce()
            unit.module.set_custom_reduce_scatter(reduction)
            unit.module.set_all_reduce_hook(reduction.reduced)
    return BLOCKED


class _AllGather(DefaultAllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with waiting():
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    """Measures the reduction of a unit's gradients over its shards, then over replicas."""

    _ready_s = 0.0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        with waiting():
            work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._ready_s = clock.monotonic()
        return work

    def reduced(self, _: Tensor) -> None:
        """Count the reduction over replicas; FSDP2 calls it when that is complete, or without replicas."""
        BLOCKED.add(clock.monotonic() - self._ready_s)


class _Reduce(ReduceWhole):
    """Measures the reduction over replicas of unsharded parameters."""

    _ready_s = 0.0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory; the output is allocated last before the reduction."""
        given = super().allocate(size, dtype=dtype, device=device)
        self._ready_s = clock.monotonic()
        return given

    def reduced(self, _: Tensor) -> None:
        """Count the reduction, if there are replicas."""
        BLOCKED.add(clock.monotonic() - self._ready_s)

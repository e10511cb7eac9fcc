"""Count how long the gathers and reductions of FSDP2 block, on CPUs: the time of the calls.

Those that ethernet.py schedules count their waits themselves.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.core import clock
from penstock.parallel.blocked import BLOCKED, Blocked, waiting
from penstock.parallel.fsdp import ReduceWhole
from penstock.parallel.fsdp_private import DefaultAllGather, DefaultReduceScatter, units_of


def count_blocked(model: nn.Module, *, num_shards: int) -> Blocked:
    """Make a model that FSDP2 shards on a CPU count how long its collectives block; return the counter.

    Args:
        num_shards: ranks that share its parameters; 1: each holds them whole.
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
    """Times the reduction of a unit's gradients over the ranks that share it, then over copies."""

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
        """Count the reduction over copies; FSDP2 calls it when that is over, or where there are none."""
        BLOCKED.add(clock.monotonic() - self._ready_s)


class _Reduce(ReduceWhole):
    """Times the reduction over copies of what each holds whole."""

    _ready_s = 0.0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory; what comes out is asked for last before the reduction."""
        given = super().allocate(size, dtype=dtype, device=device)
        self._ready_s = clock.monotonic()
        return given

    def reduced(self, _: Tensor) -> None:
        """Count the reduction, if there are copies."""
        BLOCKED.add(clock.monotonic() - self._ready_s)

"""Collectives with gradients: what goes one way in the forward pass comes back the other in the backward.

    forward                         backward
    gather       all-gather         reduce-scatter
    scatter_sum  reduce-scatter     all-gather
    exchange     all-to-all         all-to-all
    sum_gradient nothing            all-reduce

All wait for their result. torch's own hand out tensors that are still under way and wait when first
touched; a compiled block does not touch them that way, and its gradients were lost. The groups are
named, not held, because a compiler can look a name up and not a group.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

_ops = torch.ops._c10d_functional  # traceable; their results are new tensors


def gather(x: Tensor, *, dim: int, group: str) -> Tensor:
    """Join the parts that the ranks of a group hold along a dim, in their order."""
    out: Tensor = _Gather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def scatter_sum(x: Tensor, *, dim: int, group: str) -> Tensor:
    """Sum over the ranks of a group; each keeps its part along a dim, which they divide evenly."""
    out: Tensor = _ScatterSum.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def exchange(x: Tensor, *, split: int, join: int, group: str) -> Tensor:
    """Give rank i the i-th part along dim `split`; join what the others give along dim `join`."""
    out: Tensor = _Exchange.apply(x, split, join, group)  # type: ignore[no-untyped-call]
    return out


def sum_gradient(x: Tensor, *, group: str) -> Tensor:
    """Return `x`, which is equal on all ranks of a group but used by each for its own part of the work."""
    out: Tensor = _SumGradient.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:  # Any: torch's context
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(gradients[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradients[0], ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: str) -> Tensor:
        ctx.dims, ctx.group = (split, join), group
        return _all_to_all(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        split, join = ctx.dims
        return _all_to_all(gradients[0], join, split, ctx.group), None, None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], "sum", ctx.group), None


def all_reduce(x: Tensor, how: str, group: str) -> Tensor:
    """Return the elementwise "sum" or "max" over the ranks of a group; no gradient of its own."""
    out: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), how, group))
    return out


def _all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    size = _size(group)
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))
    return whole if dim == 0 else torch.cat(whole.chunk(size), dim)


def _reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    size = _size(group)
    assert x.shape[dim] % size == 0, (x.shape, dim, size)
    stacked = x if dim == 0 else torch.cat(x.chunk(size, dim))
    out: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked.contiguous(), "sum", size, group))
    return out


def _all_to_all(x: Tensor, split: int, join: int, group: str) -> Tensor:
    size = _size(group)
    assert x.shape[split] % size == 0, (x.shape, split, size)
    stacked = torch.stack(x.chunk(size, split))
    parts = _ops.wait_tensor(_ops.all_to_all_single(stacked, [1] * size, [1] * size, group))
    return torch.cat(list(parts.unbind()), join)


def _size(group: str) -> int:
    size: int = dist.get_world_size(_resolve_process_group(cast(Any, group)))  # a name has a type of its own
    return size

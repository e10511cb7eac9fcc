"""Differentiable collectives: each has its counterpart in the backward pass.

    forward                         backward
    gather       all-gather         reduce-scatter
    scatter_sum  reduce-scatter     all-gather
    exchange     all-to-all         all-to-all
    sum_gradient nothing            all-reduce
    sum_all      all-reduce         all-reduce

All wait for their result. torch's own return tensors that are still in flight and wait when first touched; a
compiled block does not touch them that way, and its gradients were lost. To the compiler each is one operator
that includes the wait, so that the wait is timed (exposed_comm.py) in compiled blocks too. A group is given
by name and size, not as a process group, because a compiler can trace only the former.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.parallel.exposed_comm import waiting

_ops = torch.ops._c10d_functional  # they take groups by name; their results are new tensors


class CollectiveGroup(NamedTuple):
    """Ranks of a collective, by the name of their process group."""

    name: str
    size: int


def group_of(mesh: DeviceMesh) -> CollectiveGroup:
    """Return the ranks of a one-axis mesh."""
    return CollectiveGroup(mesh.get_group().group_name, mesh.size())


def gather(x: Tensor, *, dim: int, group: CollectiveGroup) -> Tensor:
    """Concatenate the ranks' parts along a dim, in rank order."""
    out: Tensor = _Gather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def scatter_sum(x: Tensor, *, dim: int, group: CollectiveGroup) -> Tensor:
    """Sum over the ranks; each keeps its part along a dim, which the group size must divide."""
    out: Tensor = _ScatterSum.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def exchange(x: Tensor, *, split: int, join: int, group: CollectiveGroup) -> Tensor:
    """Send the i-th part along dim `split` to rank i; concatenate the received parts along dim `join`."""
    out: Tensor = _Exchange.apply(x, split, join, group)  # type: ignore[no-untyped-call]
    return out


def sum_gradient(x: Tensor, *, group: CollectiveGroup) -> Tensor:
    """Return `x`; its gradient is summed over the ranks, which use equal `x` for different parts of the
    work."""
    out: Tensor = _SumGradient.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def sum_all(x: Tensor, *, group: CollectiveGroup) -> Tensor:
    """Return the sum over the ranks, each of which computes its own part with it."""
    out: Tensor = _SumAll.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: CollectiveGroup) -> Tensor:  # Any: torch's context
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(gradients[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: CollectiveGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradients[0], ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: CollectiveGroup) -> Tensor:
        ctx.dims, ctx.group = (split, join), group
        return _all_to_all(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        split, join = ctx.dims
        return _all_to_all(gradients[0], join, split, ctx.group), None, None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], "sum", ctx.group), None


class _SumAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], "sum", ctx.group), None


def all_reduce(x: Tensor, how: str, group: CollectiveGroup) -> Tensor:
    """Return the elementwise "sum" or "max" over the ranks, without a gradient."""
    out: Tensor = _reduced(x.contiguous(), how, group.name)
    return out


def _all_gather(x: Tensor, dim: int, group: CollectiveGroup) -> Tensor:
    whole = _gathered(x.contiguous(), group.size, group.name)
    return whole if dim == 0 else torch.cat(whole.chunk(group.size), dim)


def _reduce_scatter(x: Tensor, dim: int, group: CollectiveGroup) -> Tensor:
    assert x.shape[dim] % group.size == 0, (x.shape, dim, group)
    stacked = (x if dim == 0 else torch.cat(x.chunk(group.size, dim))).contiguous()
    out: Tensor = _scattered(stacked, group.size, group.name)
    return out


def _all_to_all(x: Tensor, split: int, join: int, group: CollectiveGroup) -> Tensor:
    assert x.shape[split] % group.size == 0, (x.shape, split, group)
    parts = _exchanged(torch.stack(x.chunk(group.size, split)), group.name)
    return torch.cat(list(parts.unbind()), join)


@torch.library.custom_op("penstock::all_reduce", mutates_args=())
def _reduced(x: Tensor, how: str, group: str) -> Tensor:
    with waiting():
        out: Tensor = _ops.wait_tensor(_ops.all_reduce(x, how, group))
    return out


@torch.library.custom_op("penstock::all_gather", mutates_args=())
def _gathered(x: Tensor, size: int, group: str) -> Tensor:
    with waiting():
        out: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(x, size, group))
    return out


@torch.library.custom_op("penstock::reduce_scatter", mutates_args=())
def _scattered(x: Tensor, size: int, group: str) -> Tensor:
    with waiting():
        out: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", size, group))
    return out


@torch.library.custom_op("penstock::exchange", mutates_args=())
def _exchanged(x: Tensor, group: str) -> Tensor:
    one_each = [1] * len(x)
    with waiting():
        out: Tensor = _ops.wait_tensor(_ops.all_to_all_single(x, one_each, one_each, group))
    return out


@_reduced.register_fake
@_exchanged.register_fake
def _alike(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@_gathered.register_fake
def _larger(x: Tensor, size: int, _: str) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


@_scattered.register_fake
def _smaller(x: Tensor, size: int, _: str) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:])

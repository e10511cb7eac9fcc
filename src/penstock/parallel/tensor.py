"""Tensor and sequence parallelism: each matrix is sharded over an axis, and so are the tokens in between.

Query, key, value, gate and up are sharded by output, so that a rank has whole heads and neurons; output and
down by input, so that their results are sums over ranks (Shoeybi et al., "Megatron-LM", 2019). Between them,
where work is per token, each rank holds a slice of the tokens (Korthikanti et al., 2022):

    tokens/T -> norm -> gather -> query key value -> attend over heads/T -> output -> sum, scatter -> tokens/T
    tokens/T -> norm -> gather -> gate up -> multiply                    -> down   -> sum, scatter -> tokens/T

Norms of queries and keys over all heads are sharded as the heads are; the ranks add up the sums of squares,
two numbers per token.

Parameters are DTensors, which describe the sharding for FSDP and checkpoints; the arithmetic is on plain
tensors with collectives by name (docs/adr/0013). Parameters that every rank holds whole (norms, biases after
a sum) see part of the tokens or heads on each rank, so their gradients are summed over the axis.

With more ranks than key-value heads, the ranks whose queries read the same head share it: each has some rows
of its matrices, computes that part of its keys and values, and gathers the others'. So no parameter and no
product is duplicated, and gradients of the parts are summed where the parts were joined.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from penstock.nn.attention import Attend, GroupedQueryAttention, LayerCache, Rope
from penstock.nn.dtensor import local
from penstock.nn.mlp import FeedForward
from penstock.nn.norm import RMSNorm
from penstock.parallel.collectives import (
    CollectiveGroup,
    gather,
    group_of,
    scatter_sum,
    sum_all,
    sum_gradient,
)
from penstock.parallel.slices import become

_SHARED = ("key", "value")
_BY_OUTPUT = ("query", *_SHARED, "gate", "up")
_BY_INPUT = ("output", "down")


class ColumnLinear(nn.Linear):
    """Column-parallel linear layer: this rank's outputs from whole inputs."""

    multiply: Callable[..., Tensor] = staticmethod(functional.linear)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self.multiply(x, local(self.weight), None if self.bias is None else local(self.bias))


class SharedHeadLinear(ColumnLinear):
    """Column-parallel linear layer for a key-value head shared by several ranks; gathers their parts."""

    sharing: CollectiveGroup

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return gather(super().forward(x), dim=-1, group=self.sharing)


class RowLinear(nn.Linear):
    """Row-parallel linear layer: all outputs from this rank's inputs; sums are scattered over the tokens."""

    multiply: Callable[..., Tensor] = staticmethod(functional.linear)
    group: CollectiveGroup

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [batch, seq, ...]; the result is [batch, seq / ranks, ...]."""
        out = scatter_sum(self.multiply(x, local(self.weight)), dim=1, group=self.group)
        return out if self.bias is None else out + sum_gradient(local(self.bias), group=self.group)


class SharedNorm(RMSNorm):
    """Norm with a weight on every rank, applied to tokens or heads of this rank only."""

    group: CollectiveGroup

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dim."""
        return self.normalise(x, sum_gradient(local(self.weight), group=self.group))


class SlicedNorm(RMSNorm):
    """Norm of vectors of which this rank has a part, with the weight of that part."""

    group: CollectiveGroup
    sharing: CollectiveGroup | None = None
    """Ranks that have the same part, of a key-value head, and a piece of its weight each; None: no others."""

    def weight_of_part(self) -> Tensor:
        """Return the weight of this rank's part."""
        weight = local(self.weight)
        return weight if self.sharing is None else gather(weight, dim=0, group=self.sharing)


@dataclass(frozen=True)
class RankMeans:
    """Mean squares over the heads of all ranks, each of which has as many."""

    group: CollectiveGroup

    def __call__(self, means: Tensor) -> Tensor:
        """Return the means over all ranks from those of this rank."""
        return sum_all(means, group=self.group) / self.group.size


class SlicedAttention(GroupedQueryAttention):
    """Attention with this rank's heads over all tokens."""

    group: CollectiveGroup

    def forward(self, x_blc: Tensor, rope: Rope, attend: Attend, cache: LayerCache | None = None) -> Tensor:
        """Apply attention; input and output are this rank's slice of the tokens."""
        return super().forward(gather(x_blc, dim=1, group=self.group), rope, attend, cache)


class SlicedFeedForward(FeedForward):
    """Feed-forward layer with this rank's neurons over all tokens."""

    group: CollectiveGroup

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer; input and output are this rank's slice of the tokens."""
        return super().forward(gather(x, dim=1, group=self.group))


def slice_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the matrices of all blocks over a mesh, in place, and share the norms.

    Args:
        model: on the meta device; its embedding and output matrix are not changed.
        mesh: one axis; its size must divide query heads and neurons, and divide or be a multiple of
            key-value heads.
    """
    sharing = _sharing_a_head(model, mesh)
    is_whole = cast(Any, model).config.family.qk_norm == "whole"
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, RMSNorm) and last in ("query_norm", "key_norm") and is_whole:
            become(module, SlicedNorm, mesh, {"weight": Shard(0)})
            module.sharing = sharing if last == "key_norm" else None  # type: ignore[assignment]
        elif isinstance(module, RMSNorm):
            become(module, SharedNorm, mesh, {"weight": Replicate()})
        elif type(module) is nn.Linear and last in _SHARED and sharing is not None:
            become(module, SharedHeadLinear, mesh, {"weight": Shard(0), "bias": Shard(0)})
            module.sharing = sharing  # type: ignore[assignment]  # not a module or tensor
        elif type(module) is nn.Linear and last in _BY_OUTPUT:
            become(module, ColumnLinear, mesh, {"weight": Shard(0), "bias": Shard(0)})
        elif type(module) is nn.Linear and last in _BY_INPUT:
            become(module, RowLinear, mesh, {"weight": Shard(1), "bias": Replicate()})
        elif isinstance(module, GroupedQueryAttention):
            become(module, SlicedAttention, mesh, {"sinks": Shard(0)})
            if is_whole:
                module.mean_squares = RankMeans(group_of(mesh))
        elif isinstance(module, FeedForward):
            become(module, SlicedFeedForward, mesh, {})


def _sharing_a_head(model: nn.Module, mesh: DeviceMesh) -> CollectiveGroup | None:
    """Return the ranks that share this rank's key-value head, itself included; None: heads are not shared."""
    size = mesh.size() // cast(Any, model).config.key_value_heads
    if size <= 1:
        return None
    first = mesh.get_local_rank() // size * size
    ranks = dist.get_process_group_ranks(mesh.get_group())[first : first + size]
    group = dist.new_group(ranks, use_local_synchronization=True)  # only these ranks call it
    return CollectiveGroup(group.group_name, size)

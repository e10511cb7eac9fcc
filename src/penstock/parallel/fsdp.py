"""Data parallel by FSDP2: full shards, hybrid shards, plain copies, and state in the machine's memory.

Each block is a unit: gathered before its forward and backward, freed after. Compute may be bfloat16
while the sharded parameters, the reductions and the optimizer stay float32. (Zhao et al., "PyTorch
FSDP", VLDB 2023.) One way for all: plain data parallel is a hybrid whose shards are whole.
"""

from collections.abc import Sequence
from typing import cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from penstock.parallel.fsdp_private import DefaultReduceScatter


def has_work(model: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype, offload: bool) -> bool:
    """Whether there is anything to gather, reduce, convert or move.

    Else FSDP2 would copy parameters and gradients to where they are already.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()} | {compute_dtype}
    return mesh.size() > 1 or offload or dtypes != {torch.float32}


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool | int = True,
    offload: bool = False,
) -> FSDPModule:
    """Shard a model in place, block by block; `model.layers` are the units.

    Call before the parameters are materialised: on the meta device it costs nothing.

    Args:
        mesh: one axis: all its ranks share the parameters. Two: the first copies what the second shares.
        compute_dtype: of gathered parameters and activations.
        reshard_after_forward: as in ParallelConfig; the root's parameters are kept for its backward.
        offload: keep the shards in the machine's memory.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    away: OffloadPolicy = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    )
    blocks = [block for block in cast(nn.ModuleList, model.layers) if any(True for _ in block.parameters())]
    for block in blocks:  # not those of other pipeline stages
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=away,
            reshard_after_forward=reshard_after_forward,
        )
    root = fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=away)
    if mesh.size(mesh.ndim - 1) == 1:
        for unit in (*blocks, model):
            cast(FSDPModule, unit).set_custom_reduce_scatter(ReduceWhole())
    return root


class ReduceWhole(DefaultReduceScatter):
    """Spares a copy of a unit's gradients where each rank holds its parameters whole.

    FSDP2 asks for the memory of what goes into a reduction, then for that of what comes out, and where
    there is nothing to reduce it copies the one to the other. Here both are one tensor.
    """

    def __init__(self) -> None:
        self._waiting: ReferenceType[Tensor] | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return new memory, and at the next call the same, if it is still there."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and (given := waiting()) is not None:
            return given
        fresh: Tensor = super().allocate(size, dtype=dtype, device=device)
        self._waiting = ref(fresh)  # weak: FSDP2 holds it until it asks again, but not if it failed meanwhile
        return fresh

"""Data parallelism by FSDP2: full sharding, hybrid sharding, plain replicas, and offloading to host memory.

Each block is a unit: gathered before its forward and backward pass, freed after. Compute may be bfloat16
while the sharded parameters, the reductions and the optimizer stay float32 (Zhao et al., "PyTorch FSDP", VLDB
2023). Plain data parallelism is a hybrid with whole shards, so there is one code path.
"""

from collections.abc import Collection, Sequence
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

from penstock.devices import accelerator
from penstock.parallel.sharding.fsdp_private import DefaultReduceScatter


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool | int = True,
    offload: bool = False,
    leave: Collection[nn.Parameter] = (),
) -> FSDPModule:
    """Shard a model in place; the blocks in `model.layers` are the units.

    Call before the parameters are materialised: on the meta device it is free.

    Args:
        mesh: one axis: all its ranks share the parameters. Two: replicas, then shards.
        compute_dtype: dtype of gathered parameters and activations.
        reshard_after_forward: as in ParallelConfig; the root's parameters stay until its backward pass.
        offload: keep the shards in host memory.
        leave: parameters that every rank holds whole, in `compute_dtype`; they have no gradients.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    pins = accelerator.is_accelerator(mesh.device_type)
    away: OffloadPolicy = CPUOffloadPolicy(pin_memory=pins) if offload else OffloadPolicy()
    blocks = [block for block in cast(nn.ModuleList, model.layers) if any(True for _ in block.parameters())]
    for block in blocks:  # without those of other pipeline stages
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=away,
            reshard_after_forward=reshard_after_forward,
            ignored_params=set(leave),
        )
    root = fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=away, ignored_params=set(leave))
    if mesh.size(mesh.ndim - 1) == 1:
        for unit in (*blocks, model):
            cast(FSDPModule, unit).set_custom_reduce_scatter(ReduceWhole())
    return root


class ReduceWhole(DefaultReduceScatter):
    """Avoids a copy of a unit's gradients if its parameters are not sharded.

    FSDP2 allocates the input of a reduction, then its output, and copies one to the other if there is nothing
    to reduce. Here both are one tensor.
    """

    def __init__(self) -> None:
        self._waiting: ReferenceType[Tensor] | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return new memory, and at the next call the same again, if it still exists."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and (given := waiting()) is not None:
            return given
        fresh: Tensor = super().allocate(size, dtype=dtype, device=device)
        self._waiting = ref(fresh)  # weak: FSDP2 keeps it until the next call, unless it failed in between
        return fresh

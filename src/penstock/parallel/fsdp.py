"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state in even shards.

Each block is a unit: gathered before its forward and backward, freed after. Compute may be bfloat16
while the sharded parameters, the reductions and the optimizer stay float32. (Zhao et al., "PyTorch
FSDP", VLDB 2023.)
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(model: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> FSDPModule:
    """Shard a model in place, block by block; `model.layers` are the units.

    Call before the parameters are materialised: on the meta device it costs nothing.

    Args:
        compute_dtype: of gathered parameters and activations.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in cast(nn.ModuleList, model.layers):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)

"""DTensors: this rank's part of one, without loading `torch.distributed.tensor`.

That module takes a second to import. Where nothing has imported it, no tensor is a DTensor.
"""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.core.boxes import AxisShard, Box, cut_box, whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Tensor) -> "TypeIs[DTensor]":
    """Return True if a tensor is a DTensor.

    >>> import torch
    >>> is_dtensor(torch.ones(2))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part as a plain tensor, with gradients."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def detached_local(tensor: Tensor) -> Tensor:
    """Return this rank's part, detached; writing to it writes to the tensor."""
    return local(tensor).detach()


def held_box(tensor: Tensor) -> Box:
    """Return this rank's box of a tensor; for a plain tensor, the whole.

    Raises:
        TypeError: the tensor has a placement other than shard or replicate.
    """
    if not is_dtensor(tensor):
        return whole(tensor.shape)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, cuts = tensor.device_mesh, []
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, mesh
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):  # in some releases the latter is a Shard
            is_strided = isinstance(placement, _StridedShard)
            cuts.append(AxisShard(placement.dim % tensor.ndim, mesh.size(axis), coordinate[axis], is_strided))
        elif not isinstance(placement, Replicate):
            raise TypeError(f"placement {placement} is neither a shard nor a copy")
    return cut_box(tensor.shape, cuts)

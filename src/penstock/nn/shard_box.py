"""Which box of a tensor this rank holds, by what a DTensor says of its mesh and placements."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from penstock.core.boxes import Box, Cut, cut_box, whole


def held_box(tensor: Tensor) -> Box:
    """Return what this rank holds of a tensor; of a plain one, all.

    Raises:
        TypeError: its layout is not one of shards and copies.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh, cuts = tensor.device_mesh, []
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, mesh
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):  # the latter is a Shard in some releases of torch
            is_strided = isinstance(placement, _StridedShard)
            cuts.append(Cut(placement.dim % tensor.ndim, mesh.size(axis), coordinate[axis], is_strided))
        elif not isinstance(placement, Replicate):
            raise TypeError(f"laid out as {placement}, neither a shard nor a copy")
    return cut_box(tensor.shape, cuts)

"""The part of a tensor that this rank holds, and new tensors that lie on the ranks as a parameter does."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds; writing to it writes to the tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def like(parameter: Tensor, here: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of which this rank holds `here`, cut over the ranks where `parameter` is.

    Args:
        shape: of the whole.
    """
    if not isinstance(parameter, DTensor):
        return here
    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        here,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )
    return whole.to(here.device)  # from_local moves what is kept in the machine's memory to the device


def sharded_axes(parameter: Tensor) -> tuple[int, ...]:
    """Return the mesh axes over which a parameter is cut, those of one rank left out."""
    if not isinstance(parameter, DTensor):
        return ()
    cut = (isinstance(p, Shard | _StridedShard) for p in parameter.placements)
    return tuple(axis for axis, is_cut in enumerate(cut) if is_cut and parameter.device_mesh.size(axis) > 1)

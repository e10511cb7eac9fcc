"""Slices of parameters: layers with sharded weights, and the local part of a tensor.

A parameter becomes a DTensor, which describes the position of its slices, and the layer computes with the
plain tensor of its own slice.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.nn.dtensor import is_dtensor
from penstock.parallel.collectives import group_of

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def become(
    module: nn.Module, sliced: type[nn.Module], mesh: DeviceMesh, placements: "Mapping[str, Placement]"
) -> None:
    """Turn a module into one of a subclass, in place, with its parameters on a one-axis mesh.

    Submodules and parameters keep their names, so checkpoints and initial weights stay valid. The ranks of
    the mesh are in `self.group` of the new class.

    Args:
        sliced: a subclass of the module's class with its own forward.
        placements: by parameter name; parameters that the module does not have are ignored.
    """
    from torch.distributed.tensor import distribute_tensor

    assert issubclass(sliced, type(module)), (sliced, type(module))
    module.__class__ = sliced
    module.group = group_of(mesh)  # type: ignore[assignment]  # not a module or tensor
    for name, placement in placements.items():
        parameter = getattr(module, name)
        if parameter is not None:
            placed = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def like(parameter: Tensor, here: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor sharded like `parameter`, with `here` as this rank's slice.

    Args:
        shape: shape of the whole tensor.
    """
    if not is_dtensor(parameter):
        return here
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        here,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )
    return whole.to(here.device)  # from_local moves offloaded tensors to the device


def sharded_axes(parameter: Tensor) -> tuple[int, ...]:
    """Return the mesh axes over which a parameter is sharded, without those of one rank."""
    if not is_dtensor(parameter):
        return ()
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    cut = (isinstance(p, Shard | _StridedShard) for p in parameter.placements)
    return tuple(axis for axis, is_cut in enumerate(cut) if is_cut and parameter.device_mesh.size(axis) > 1)

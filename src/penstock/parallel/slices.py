"""Give a layer a slice of its parameters: another class with another forward, the same names.

A parameter becomes a DTensor, which says where its slices lie, and the layer computes with the plain
tensor of its own slice.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from penstock.parallel.collectives import group_of


def become(
    module: nn.Module, sliced: type[nn.Module], mesh: DeviceMesh, placements: Mapping[str, Placement]
) -> None:
    """Turn a module into one of a subclass, in place, its parameters on a mesh of one axis.

    The names of submodules and parameters stay, and with them checkpoints and initial weights. The new
    class finds the ranks of the mesh as `self.group`.

    Args:
        sliced: a subclass of the module's class with a forward of its own.
        placements: by name of parameter; those the module does not have are passed over.
    """
    assert issubclass(sliced, type(module)), (sliced, type(module))
    module.__class__ = sliced
    module.group = group_of(mesh)  # type: ignore[assignment]  # not a module or tensor
    for name, placement in placements.items():
        parameter = getattr(module, name)
        if parameter is not None:
            placed = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def local(parameter: Tensor) -> Tensor:
    """Return this rank's slice as a plain tensor, through which gradients flow."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

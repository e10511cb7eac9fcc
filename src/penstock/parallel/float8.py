"""Linear layers of the blocks in 8 bits, and their weights sent in float8 when shards are gathered.

What travels is codes and one exponent a row, packed as bytes: half of bfloat16. A row lies whole on the
ranks that hold it, so no scale has to be agreed on. Where it arrives it becomes a weight of the compute
type again, exactly: the layer rounds it with the same scales a second time, which changes nothing. So
recomputation, compilation and checkpoints see plain weights. (What arrives could stay in 8 bits, for
half the memory of one block; torchao.float8 does that with tensor subclasses.)

The seam is FSDP2's own: it asks the local tensor of a parameter for `fsdp_pre_all_gather` and
`fsdp_post_all_gather`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from penstock.nn.float8 import RECIPES, ROW, Float8Linear, Multiply, Scaled, has_native, scaled
from penstock.parallel.tensor import ColumnLinear, RowLinear


def multiply_in_8_bits(model: nn.Module, recipe: str, *, device: str) -> None:
    """Let the linear layers of the blocks multiply by a recipe, in place; slices of layers too.

    Args:
        recipe: a name in `nn.float8.RECIPES`.
        device: kind of the devices that will compute.
    """
    chosen = RECIPES[recipe]
    multiply = Multiply(chosen, has_native(chosen, device))
    for module in model.get_submodule("layers").modules():
        if type(module) is nn.Linear:
            module.__class__ = Float8Linear
        if isinstance(module, Float8Linear | ColumnLinear | RowLinear):
            module.multiply = multiply


def gather_in_float8(model: nn.Module) -> None:
    """Send the weights of 8-bit layers in float8, in place.

    Weights of which some rank holds fewer rows than another travel as before.

    Args:
        model: sharded by FSDP2 and materialised.
    """
    for layer in _in_8_bits(model):
        weight = layer.weight
        assert isinstance(weight, DTensor), type(weight)
        here = weight._local_tensor  # what FSDP2 asks; to_local() would be another view of it
        if _is_even(weight, here):
            here.fsdp_pre_all_gather = _packed  # type: ignore[attr-defined]
            here.fsdp_post_all_gather = _unpacked  # type: ignore[attr-defined]


def _in_8_bits(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(getattr(module, "multiply", None), Multiply):
            yield module


def _is_even(weight: DTensor, here: Tensor) -> bool:
    """Return whether all ranks hold shards of one size."""
    num_shards = 1
    for axis, placement in enumerate(weight.placements):
        num_shards *= 1 if placement.is_replicate() else weight.device_mesh.size(axis)
    return here.numel() * num_shards == weight.numel()


def _packed(
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Linear,
    policy: MixedPrecisionPolicy,
) -> tuple[tuple[Tensor], None]:
    """Return what a rank sends: [rows, columns + 1] bytes, the last of a row its exponent."""
    del mesh, outer_size, outer_stride
    weight = module.weight
    assert isinstance(weight, DTensor), type(weight)
    here = weight.to_local().detach()
    rounded = scaled(here.to(policy.param_dtype or here.dtype), ROW, torch.float8_e4m3fn)
    return (torch.cat([rounded.codes.view(torch.uint8), rounded.exponents], dim=1),), None


def _unpacked(
    outputs: tuple[Tensor],
    metadata: None,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor]] | None:
    """Return the whole weight; into `out` where FSDP2 has memory for it already."""
    del metadata
    (received,) = outputs
    codes = received[:, :-1].contiguous().view(torch.float8_e4m3fn)
    whole = Scaled(codes, received[:, -1:], codes.shape[1]).values(dtype)
    if out is None:
        return whole, (whole,)
    target = out._local_tensor if isinstance(out, DTensor) else out
    with torch.no_grad(), _unsafe_preserve_version_counter(target):  # as FSDP2 does itself: the same numbers
        target.copy_(whole)
    return None

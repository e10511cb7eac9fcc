"""Send weights in fewer bits when shards are gathered; compute sees plain weights again.

The seam is FSDP2's own: it asks the local tensor of a parameter for `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, what to send and what it was. So recomputation, compilation and checkpoints see plain
weights, whatever carries the bytes carries them as any others, and the shards stay as precise as they are:
each gather rounds them anew, for forward and backward alike.

Matrices are sent in blocks (parallel/codecs.py). What has one dim, norms and biases, is little and is left as
it is. Layers that multiply in float8 would round their weights anyway: in float8 they are sent as the codes
and exponents of the layer itself, one a row, which changes nothing, and all else is left as it is. A row lies
whole on the ranks that hold it, so no scale has to be agreed on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from penstock.nn.float8 import ROW, Multiply, Scaled, scaled
from penstock.parallel.codecs import decode, encode
from penstock.parallel.encoded_size import CodecName
from penstock.parallel.ethernet_config import Gather


class _Way(Protocol):
    """How a matrix travels."""

    def encode(self, here: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a shard as bytes, [any, any] uint8, for a weight that compute reads as `dtype`."""

    def decode(self, received: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the numbers of all shards, each of `shape`, from their bytes one below the other."""


@dataclass(frozen=True, slots=True)
class _InBlocks:
    codec: CodecName

    def encode(self, here: Tensor, dtype: torch.dtype) -> Tensor:
        del dtype
        return encode(here.reshape(1, -1), self.codec)

    def decode(self, received: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return decode(received, self.codec, size=shape.numel()).reshape(-1, *shape[1:]).to(dtype)


class _InRowsOfFloat8:
    def encode(self, here: Tensor, dtype: torch.dtype) -> Tensor:
        rounded = scaled(here.to(dtype), ROW, torch.float8_e4m3fn)
        return torch.cat([rounded.codes.view(torch.uint8), rounded.exponents], dim=1)

    def decode(self, received: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        codes = received[:, :-1].contiguous().view(torch.float8_e4m3fn)
        return Scaled(codes, received[:, -1:], shape[1]).values(dtype)


def encode_gathers(model: nn.Module, gather: Gather) -> None:
    """Send the matrices of a model in fewer bits, in place.

    Those of which some rank holds fewer rows than another travel as before.

    Args:
        model: sharded by FSDP2 over several ranks, and materialised.
        gather: "float8" leaves out what is not multiplied in float8, where anything is.
    """
    if gather == "compute":
        return
    by_rows = gather == "float8" and any(map(_multiplies_in_float8, model.modules()))
    way: _Way = _InRowsOfFloat8() if by_rows else _InBlocks(gather)
    for module, name, weight in _matrices(model):
        here = weight._local_tensor  # what FSDP2 asks; to_local() would be another view of it
        if _is_even(weight, here) and (not by_rows or _multiplies_in_float8(module)):
            here.fsdp_pre_all_gather = partial(_packed, way, name)  # type: ignore[attr-defined]
            here.fsdp_post_all_gather = partial(_unpacked, way)  # type: ignore[attr-defined]


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, DTensor]]:
    """Give each matrix once, with the first module that has it and its name there."""
    seen: set[int] = set()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim > 1 and id(weight) not in seen:
                assert isinstance(weight, DTensor), type(weight)
                seen.add(id(weight))
                yield module, name, weight


def _multiplies_in_float8(module: nn.Module) -> bool:
    """Return whether a layer rounds its weight so that rows rounded before lose nothing more."""
    multiply = getattr(module, "multiply", None)
    return isinstance(module, nn.Linear) and isinstance(multiply, Multiply) and multiply.recipe.groups <= 0


def _is_even(weight: DTensor, here: Tensor) -> bool:
    """Return whether all ranks hold shards of one size."""
    num_shards = 1
    for axis, placement in enumerate(weight.placements):
        num_shards *= 1 if placement.is_replicate() else weight.device_mesh.size(axis)
    return here.numel() * num_shards == weight.numel()


def _packed(
    way: _Way,
    name: str,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Module,
    policy: MixedPrecisionPolicy,
) -> tuple[tuple[Tensor], torch.Size]:
    """Return what a rank sends, and the shape of its shard."""
    del mesh, outer_size, outer_stride
    weight = module.get_parameter(name)
    assert isinstance(weight, DTensor), type(weight)
    here = weight.to_local().detach()
    return (way.encode(here, policy.param_dtype or here.dtype),), here.shape


def _unpacked(
    way: _Way,
    outputs: tuple[Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor]] | None:
    """Return the whole weight; into `out` where FSDP2 has memory for it already."""
    (received,) = outputs
    whole = way.decode(received, shape, dtype)
    received.untyped_storage().resize_(0)  # FSDP2 would keep it as long as the weight, and makes it anew
    if out is None:
        return whole, (whole,)
    target = out._local_tensor if isinstance(out, DTensor) else out
    with torch.no_grad(), _unsafe_preserve_version_counter(target):  # as FSDP2 does itself: the same numbers
        target.copy_(whole)
    return None

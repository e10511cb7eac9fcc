"""Compressed gathers: weights are sent in fewer bits and decoded before compute.

This uses FSDP2's extension point: `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a parameter's local
tensor encode and decode. So recomputation, compilation and checkpoints see plain weights, any transport
works, and the shards keep their
precision: each gather rounds them again, the same for forward and backward.

Matrices are encoded in blocks (parallel/ethernet/codecs.py). One-dimensional parameters, norms and biases,
are small and sent as they are. Layers that multiply in float8 would round their weights anyway: in float8
they are sent as the layer's own codes and exponents, one per row, without additional loss, and everything
else is sent as it is. A row is complete on its rank, so ranks need not agree on scales.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from penstock.nn.linear.float8 import ROW, Multiply, Scaled, power_of_two, scaled
from penstock.parallel.config import Gather
from penstock.parallel.ethernet.codecs import decode, encode
from penstock.parallel.ethernet.wire_size import CodecName


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
        return Scaled(codes, received[:, -1:], power_of_two(received[:, -1:]), shape[1]).values(dtype)


_WireFormat = _InBlocks | _InRowsOfFloat8
"""Format of a matrix on the wire.

`encode(here, dtype)` returns a shard as bytes, [any, any] uint8, for a weight used in `dtype`.
`decode(received, shape, dtype)` returns all shards, each of `shape`, from their concatenated bytes.
"""


def encode_gathers(model: nn.Module, gather: Gather) -> None:
    """Compress the gathers of a model's matrices, in place.

    Matrices that are sharded unevenly are sent as they are.

    Args:
        model: sharded by FSDP2 over several ranks, and materialised.
        gather: "float8" compresses only the layers that multiply in float8, if there are any.
    """
    if gather == "compute":
        return
    by_rows = gather == "float8" and any(map(_multiplies_in_float8, model.modules()))
    wire_format: _WireFormat = _InRowsOfFloat8() if by_rows else _InBlocks(gather)
    for module, name, weight in _matrices(model):
        here = weight._local_tensor  # the object that FSDP2 uses; to_local() would be another view
        if _is_even(weight, here) and (not by_rows or _multiplies_in_float8(module)):
            here.fsdp_pre_all_gather = partial(_packed, wire_format, name)  # type: ignore[attr-defined]
            here.fsdp_post_all_gather = partial(_unpacked, wire_format)  # type: ignore[attr-defined]


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, DTensor]]:
    """Yield each matrix once, with the first module that has it and its name there."""
    seen: set[int] = set()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim > 1 and id(weight) not in seen:
                assert isinstance(weight, DTensor), type(weight)
                seen.add(id(weight))
                yield module, name, weight


def _multiplies_in_float8(module: nn.Module) -> bool:
    """Return True if a layer rounds its weight by rows, so that earlier rounding by rows loses nothing."""
    multiply = getattr(module, "multiply", None)
    return isinstance(module, nn.Linear) and isinstance(multiply, Multiply) and multiply.recipe.groups <= 0


def _is_even(weight: DTensor, here: Tensor) -> bool:
    """Return True if all ranks have shards of one size."""
    num_shards = 1
    for axis, placement in enumerate(weight.placements):
        num_shards *= 1 if placement.is_replicate() else weight.device_mesh.size(axis)
    return here.numel() * num_shards == weight.numel()


def _packed(
    wire_format: _WireFormat,
    name: str,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Module,
    policy: MixedPrecisionPolicy,
) -> tuple[tuple[Tensor], torch.Size]:
    """Return the bytes to send, and the shape of the shard."""
    del mesh, outer_size, outer_stride
    weight = module.get_parameter(name)
    assert isinstance(weight, DTensor), type(weight)
    here = weight.to_local().detach()
    return (wire_format.encode(here, policy.param_dtype or here.dtype),), here.shape


def _unpacked(
    wire_format: _WireFormat,
    outputs: tuple[Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor]] | None:
    """Return the whole weight; written to `out` if FSDP2 already has memory for it."""
    (received,) = outputs
    whole = wire_format.decode(received, shape, dtype)
    received.untyped_storage().resize_(0)  # FSDP2 would keep it as long as the weight
    if out is None:
        return whole, (whole,)
    target = out._local_tensor if isinstance(out, DTensor) else out
    with torch.no_grad(), _unsafe_preserve_version_counter(target):  # as FSDP2 does: the values are equal
        target.copy_(whole)
    return None

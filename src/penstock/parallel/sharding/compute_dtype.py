"""Mixed precision of a rank that shares parameters with no other: what FSDP2 computes, without FSDP2.

FSDP2 on one rank copies each unit's parameters into a buffer of the compute dtype, and its gradients into one
of float32: 4.4 GB a step at 1B, although no rank receives them. Here a module's parameters are cast where its
forward begins, with a graph, so a gradient is computed in the compute dtype and added up in the parameter's
own. The numbers are those of FSDP2, bit for bit.

A module's `forward` is replaced, as in activation_checkpointing.py: names do not change, and a compiled block
has the casts in its program. The casts of a unit live until its backward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.nn.dtensor import is_dtensor

Forward = Callable[..., Any]  # Any: arguments and result of a module


def compute_in(module: nn.Module, dtype: torch.dtype, *, without: Iterable[nn.Module] = ()) -> None:
    """Make a module compute with its floating-point parameters cast to a dtype, in place.

    Args:
        without: parts of the module that cast their own parameters.
    """
    others = {parameter for part in without for parameter in part.parameters()}
    held = [
        (part, name)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if parameter not in others and parameter.is_floating_point() and parameter.dtype != dtype
    ]
    if held:
        module.forward = partial(_with_casts, module.forward, held, dtype)


def compute_blocks_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make each block of a model compute with its parameters cast to a dtype, in place.

    Args:
        model: its blocks are `model.layers`.
    """
    for block in cast(nn.ModuleList, model.layers):
        compute_in(block, dtype)


def _with_casts(
    forward: Forward, held: list[tuple[nn.Module, str]], dtype: torch.dtype, *args: Any, **options: Any
) -> Any:
    kept = [cast(Tensor, part._parameters[name]) for part, name in held]
    _put(held, _cast_all(kept, dtype))
    try:
        return forward(*args, **options)
    finally:
        _put(held, kept)


def _put(held: list[tuple[nn.Module, str]], parameters: Sequence[Tensor]) -> None:
    for (part, name), parameter in zip(held, parameters, strict=True):
        part._parameters[name] = parameter  # type: ignore[assignment]  # a tensor with a graph, for a while


def _cast_all(parameters: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    if any(is_dtensor(parameter) for parameter in parameters):
        return [parameter.to(dtype) for parameter in parameters]
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    casts = iter(cast(Sequence[Tensor], _CastAll.apply(dtype, *learned)))  # type: ignore[no-untyped-call]
    return [next(casts) if parameter.requires_grad else parameter.to(dtype) for parameter in parameters]


class _CastAll(torch.autograd.Function):
    """Casts tensors to a dtype, and their gradients back; compiled, by one kernel for all."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:  # Any: torch's
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return _copied(tensors, [dtype] * len(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [i for i, gradient in enumerate(gradients) if gradient is not None]
        given = [cast(Tensor, gradients[i]) for i in found]
        result: list[Tensor | None] = [None] * len(gradients)
        for i, gradient in zip(found, _copied(given, [ctx.dtypes[i] for i in found]), strict=True):
            result[i] = gradient
        return None, *result


def _copied(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    if not torch.compiler.is_compiling():
        return tuple(tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True))
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    # not _foreach_copy_: torch 2.11 loses the gradients of tensors that are written in place
    return tuple(torch.ops.aten._foreach_copy(copies, list(tensors)))

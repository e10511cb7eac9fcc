"""Tensors of a training state by name, and the box of each that this rank holds."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from penstock.checkpoint.layout import MODEL, OPTIMIZER
from penstock.core.boxes import Box, whole
from penstock.core.errors import CheckpointError
from penstock.nn.dtensor import held_box, is_dtensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors."""
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor that a resumed run needs; the live ones, so that loading into them is enough.

    The optimizer's hyperparameters are not among them: they come from the recipe. Neither are parameters that
    an adapter freezes, which are read again from where the run started.
    """
    if not optimizer.state:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # a second

        get_optimizer_state_dict(model, optimizer)  # creates the moments that the first step would create
    frozen = set()
    if getattr(model, "has_adapters", False):
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {
        **{f"{MODEL}{name}": t for name, t in model.state_dict().items() if name not in frozen},
        **dict(_moments(model, optimizer)),
    }


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{OPTIMIZER}{name}.{key}", value


def spelled(name: str, tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in safetensors.

    Raises:
        CheckpointError: there is none.
    """
    if tensor.dtype not in _SPELLED:
        raise CheckpointError(f"{name} has a dtype that checkpoints do not support", got=str(tensor.dtype))
    return _SPELLED[tensor.dtype]


def held(name: str, tensor: Tensor) -> tuple[Box, Tensor]:
    """Return the box of a tensor that this rank holds, and its data; a plain tensor is held whole.

    Raises:
        CheckpointError: its layout is not made of shards and replicas.
    """
    data = tensor.detach()
    if not is_dtensor(data):
        return whole(data.shape), data
    local = data.to_local()
    try:
        box = held_box(data)
    except TypeError as error:
        raise CheckpointError(f"{name} is {error}: a checkpoint of it would be wrong") from None
    if tuple(local.shape) != box.sizes and (local.numel() or box.num_elements):
        raise CheckpointError(
            f"{name} has a shard of {tuple(local.shape)} where its layout {data.placements} says {box.sizes}",
            fix="Report this as a bug: a checkpoint of it would be wrong.",
        )
    return box, local.reshape(box.sizes)

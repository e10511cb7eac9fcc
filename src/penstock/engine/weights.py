"""What a loaded model's matrices become for serving: packed, or rounded to fewer bits. One table decides.

    convert (the type of everything) -> fuse -> prepare (the matrices)

Every plain linear layer is replaced where it stands, so whatever wraps it keeps it: merged parts, an adapter,
the sum over ranks. A matrix is freed as soon as its layer has its own copy, and one that a file holds
(memory-mapped) never was in memory of its own: the peak is one model and one matrix.

Embeddings stay as they are, because looking a token up reads one row. Where the output matrix is the
embedding again it gets a copy of its own, because every token reads it whole.
"""

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import nn

from penstock.core.errors import ConfigError, nearest
from penstock.engine.config import Weights
from penstock.models.llama.model import Llama
from penstock.nn.float8 import RECIPES, has_native
from penstock.nn.packed import packed
from penstock.nn.quantized import GROUP, Float8Linear, Int4Linear, Int8Linear

Make = Callable[[nn.Linear], nn.Module]
"""Returns a layer that takes the place of a plain one."""

OUTPUT = "unembed"
"""Name of the layer from hidden states to logits."""


def convert(model: Llama, weights: Weights) -> None:
    """Give everything in a model the type that `weights` names, if it names a float type, in place."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(weights)
    if dtype is not None:
        model.to(dtype)


@torch.no_grad()
def prepare(model: Llama, weights: Weights) -> None:
    """Replace the matrices of a model, which is on its device, in place; it cannot be trained or saved after.

    Norms, embedding and activations keep their type.

    Raises:
        ConfigError: no such type of weights, or the device has no instructions for it.
    """
    make, make_output = _makers(weights, model.embed.weight.device)
    if model.unembed is None:
        model.unembed = _output_of(model.embed)
    for name in [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]:
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        # no name holds the layer that is replaced: its matrix is free before the next is made
        setattr(owner, last, (make_output if name == OUTPUT else make)(getattr(owner, last)))


def _makers(weights: Weights, device: torch.device) -> tuple[Make, Make]:
    """Return what makes the layers, and the last one, which 4 bits would hurt most."""
    if weights in ("stored", "float32", "bfloat16"):
        return packed, packed
    if weights == "int8":
        return Int8Linear, Int8Linear
    if weights == "int4":
        return _int4_where_it_fits, Int8Linear
    if weights == "float8":
        if not has_native(RECIPES["float8_rowwise"], device.type):
            raise ConfigError("This device has no float8 instructions", got=device.type, fix="Choose int8.")
        return partial(Float8Linear, is_native=True), packed
    raise ConfigError("No such type of weights", got=weights, fix=nearest(weights, list(get_args(Weights))))


def _int4_where_it_fits(layer: nn.Linear) -> nn.Module:
    return Int4Linear(layer) if layer.in_features % GROUP == 0 else Int8Linear(layer)


def _output_of(embed: nn.Embedding) -> nn.Linear:
    rows, hidden_size = embed.weight.shape
    layer = nn.Linear(hidden_size, rows, bias=False, device="meta")
    layer.weight = embed.weight
    return layer

"""What a loaded model's matrices become for serving: packed, or rounded to fewer bits. One table decides.

Comes after layers were sliced for a rank, merged and given adapters: every plain linear layer is replaced where
it stands, so whatever wraps it keeps it. A matrix is freed as soon as its layer has its own copy; one that a
file holds (memory-mapped) never was in memory of its own. So the peak is one model and one matrix.

Embeddings stay as they are: looking a token up reads one row. Where the output matrix is the embedding again,
it gets a packed copy, because it is read whole for every token.
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


def prepare(model: Llama, *, weights: Weights) -> None:
    """Replace the matrices of a model, which is on its device, in place; it cannot be trained or saved after.

    Args:
        weights: "stored": the type they have. "float32" and "bfloat16" also convert everything else. With the
            others norms, embedding and activations keep the stored type.

    Raises:
        ConfigError: no such type of weights, or the device has no instructions for it.
    """
    device = model.embed.weight.device
    make, make_output = _makers(weights, device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(weights)
    if model.unembed is None:
        model.unembed = _output_of(model.embed)
    with torch.no_grad():
        for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
            own = layer if dtype is None else _converted(layer, dtype)
            _replace(model, name, (make_output if name == OUTPUT else make)(own))
        if dtype is not None:
            model.to(dtype)


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


def _converted(layer: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """Return a layer of another type and leave the one given as it is: its matrix may be the embedding's."""
    own = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    own.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    if layer.bias is not None:
        own.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    return own


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)

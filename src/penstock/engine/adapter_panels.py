"""An adapter's matrices as the C++ operator of whole steps reads them (nn/native/adapted.h).

Layers that read the same input are one product there, and so is what is added to them: their A lie below one
another. A layer that the adapter leaves alone beside one that it changes gets zeros.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from penstock.engine.adapter_file import Lora
from penstock.models.llama.model import Llama
from penstock.nn.merged import MergedLinear
from penstock.nn.packed import to_panels

_LAYERS = (
    ("attention", "query_key_value"),
    ("attention", "output"),
    ("mlp", "gate_up"),
    ("mlp", "down"),
)
"""Of a fused block, in the order of the operator."""


def adapter_panels(
    loras: Mapping[str, Lora], model: Llama, dtype: torch.dtype
) -> tuple[list[Tensor | None], int]:
    """Return the panels of A and of B of each layer of each block, and the rank, filled up to whole units.

    Args:
        loras: by the layers' names in the plain network; all of one rank.
        model: fused; it says which layers are one product.
    """
    numbers = 4 // dtype.itemsize
    rank = -(-len(next(iter(loras.values())).a) // numbers) * numbers
    panels: list[Tensor | None] = []
    for number, block in enumerate(model.layers):
        for of, name in _LAYERS:
            layer = block.get_submodule(f"{of}.{name}")
            parts = dict(_parts(name, layer))
            found = {part: loras.get(f"layers.{number}.{of}.{part}") for part in parts}
            panels += _merged(found, parts, rank, dtype)
    return panels, rank


def _parts(name: str, layer: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield name and outputs of the plain layers that one is made of."""
    if isinstance(layer, MergedLinear):
        yield from layer.parts
    else:
        yield name, 0  # alone: what is added says how many


def _merged(
    found: Mapping[str, Lora | None], sizes: Mapping[str, int], rank: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    some = next((lora for lora in found.values() if lora is not None), None)
    if some is None:
        return None, None
    a = torch.zeros(len(found), rank, some.a.shape[1], dtype=dtype)
    b = [torch.zeros(size, rank, dtype=dtype) for size in sizes.values()]
    for part, lora in enumerate(found.values()):
        if lora is not None:
            a[part, : len(lora.a)] = lora.a
            b[part] = nn.functional.pad(lora.b.to(dtype), (0, rank - len(lora.a)))
    return to_panels(a.flatten(0, 1)), torch.cat([to_panels(matrix) for matrix in b])

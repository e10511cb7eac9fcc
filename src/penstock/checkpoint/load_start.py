"""Starting weights into the parameters of any layout; each rank reads only the boxes that it holds.

A vocabulary may have grown: the embedding and the output matrix then have more rows than the starting
weights. Each new row is the mean of the old rows (Hewitt, "Initializing new word embeddings for pretrained
language models", 2021): the model gives new tokens about the average probability, so old answers stay. The
mean is a sum in float64 over chunks of rows in a fixed order, so it is the same on every layout; only ranks
that hold new rows read the old ones for it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.hf import open_weights, read_rows
from penstock.checkpoint.layout import MODEL
from penstock.checkpoint.load import fill_boxes
from penstock.checkpoint.start import StartWeights, check_weights
from penstock.checkpoint.tensors import held
from penstock.checkpoint.weight_files import StoredTensor, by_file, model_tensors
from penstock.core.boxes import Box
from penstock.nn.new_rows import matrix_named

GROWING = ("embed.weight", "unembed.weight")
"""Parameters with a row per token id."""
_ROWS = 8192

Targets = Mapping[str, tuple[Box, Tensor]]
"""Name of a parameter -> box of the stored tensor, and the tensor to fill with it."""


@torch.no_grad()
def load_start(start: StartWeights, parameters: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards of parameters from starting weights, in the dtype of each.

    Args:
        parameters: by name; plain or sharded, of a model with the start's config, but for more token ids.

    Raises:
        ModelError, CheckpointError: the weights are missing, of another shape, damaged or quantised.
    """
    fill_start(start, {name: held(name, tensor) for name, tensor in parameters.items()})


@torch.no_grad()
def fill_start(start: StartWeights, targets: Targets) -> None:
    """Fill tensors with boxes of starting weights.

    Args:
        targets: of a model with the start's config, but for more token ids.

    Raises:
        ModelError, CheckpointError: as in `load_start`.
    """
    read = _reader(start)
    old, grown = {}, {}
    for name, (box, local) in targets.items():
        if name in GROWING:
            known = min(max(start.model.vocab_size - box.offsets[0], 0), box.sizes[0])
            if local[known:].numel():
                grown[name] = local[known:]
            box, local = Box(box.offsets, (known, *box.sizes[1:])), local[:known]
        if local.numel():
            old[name] = box, local
    read(old)
    for name, rows in grown.items():
        rows.copy_(_mean_row(read, name, num_rows=start.model.vocab_size, width=rows.shape[1]))


@torch.no_grad()
def load_new_rows(start: StartWeights, parameters: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards of new rows with the mean of the old ones, as `load_start` does.

    Args:
        parameters: by name, `embed.new_rows`.

    Raises:
        ModelError, CheckpointError: as in `load_start`.
    """
    for name, tensor in parameters.items():
        _, local = held(name, tensor)
        if local.numel():
            matrix, num_rows, width = matrix_named(name), start.model.vocab_size, tensor.shape[1]
            local.copy_(_mean_row(_reader(start), matrix, num_rows=num_rows, width=width))


def _mean_row(read: Callable[[Targets], None], name: str, *, num_rows: int, width: int) -> Tensor:
    total = torch.zeros(width, dtype=torch.float64)
    for first in range(0, num_rows, _ROWS):
        chunk = torch.empty(min(_ROWS, num_rows - first), width)
        read({name: (Box((first, 0), tuple(chunk.shape)), chunk)})
        total += chunk.sum(dim=0, dtype=torch.float64)
    return total / num_rows


def _reader(start: StartWeights) -> Callable[[Targets], None]:
    """Return a function that fills tensors from the stored ones."""
    if start.saved is None:
        return partial(_fill_from_folder, model_tensors(start.folder, start.model))
    check_weights(start)
    saved, index = start.saved, start.saved.index()

    def fill(targets: Targets) -> None:
        fill_boxes(saved, index, {f"{MODEL}{name}": target for name, target in targets.items()})

    return fill


def _fill_from_folder(tensors: Mapping[str, StoredTensor], targets: Targets) -> None:
    for path, names in by_file(tensors, targets).items():
        with open_weights(path) as file:
            for name in names:
                box, local = targets[name]
                local.copy_(_read_box(file, tensors[name], box))


def _read_box(file: Any, tensor: StoredTensor, box: Box) -> Tensor:  # Any: safetensors has no types
    rows = range(tensor.shape[0]) if tensor.rows is None else tensor.rows
    first, *inner = (slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    return read_rows(file, tensor.name, rows[first], *inner)

"""Starting weights into the parameters of any layout; each rank reads only the boxes that it holds.

A vocabulary may have grown: the embedding and the output matrix then have more rows than the starting
weights. Each new row is the mean of the old rows (Hewitt, "Initializing new word embeddings for pretrained
language models", 2021): the model gives new tokens about the average probability, so old answers stay. The
mean is a sum in float64 over chunks of rows in a fixed order, so it is the same on every layout; only ranks
that hold new rows read the old ones for it.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.checkpoint.hf import check_dtype, check_names, files_of, stored_names
from penstock.checkpoint.load import fill_boxes
from penstock.checkpoint.start import StartWeights, refuse_adapter
from penstock.checkpoint.tensors import MODEL, held
from penstock.core.boxes import Box
from penstock.core.errors import CheckpointError, ModelError
from penstock.core.packages import Package
from penstock.nn.new_rows import matrix_named

if TYPE_CHECKING:
    import safetensors
else:
    safetensors = Package("safetensors", "Hugging Face folders")

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
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    fill_start(start, {name: held(name, tensor) for name, tensor in parameters.items()}, shapes)


@torch.no_grad()
def fill_start(start: StartWeights, targets: Targets, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fill tensors with boxes of starting weights.

    Args:
        shapes: shape of each whole parameter, in the model that is started.

    Raises:
        ModelError, CheckpointError: as in `load_start`.
    """
    read = _reader(start, shapes)
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
            read = _reader(start, {matrix: (num_rows, width)})
            local.copy_(_mean_row(read, matrix, num_rows=num_rows, width=width))


def _mean_row(read: Callable[[Targets], None], name: str, *, num_rows: int, width: int) -> Tensor:
    total = torch.zeros(width, dtype=torch.float64)
    for first in range(0, num_rows, _ROWS):
        chunk = torch.empty(min(_ROWS, num_rows - first), width)
        read({name: (Box((first, 0), tuple(chunk.shape)), chunk)})
        total += chunk.sum(dim=0, dtype=torch.float64)
    return total / num_rows


def _reader(start: StartWeights, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[Targets], None]:
    """Return a function that fills tensors from the stored ones."""
    expected = {
        name: (start.model.vocab_size, *shape[1:]) if name in GROWING else shape
        for name, shape in shapes.items()
    }
    if start.saved is None:
        return _Folder(start, expected).fill
    refuse_adapter(start)
    saved, index = start.saved, start.saved.index()
    for name, shape in expected.items():
        entry = index.tensors.get(f"{MODEL}{name}")
        if entry is None or entry.shape != shape:
            stored = "no such tensor" if entry is None else f"{entry.shape}"
            raise CheckpointError(
                f"{saved} does not match the model: {name} of shape {shape}",
                got=stored,
                fix="Give the run or checkpoint of a model of these sizes.",
            )

    def fill(targets: Targets) -> None:
        fill_boxes(saved, index, {f"{MODEL}{name}": target for name, target in targets.items()})

    return fill


class _Folder:
    """Weights of a Hugging Face folder.

    Args:
        shapes: expected shapes of the stored tensors, by our names.
    """

    def __init__(self, start: StartWeights, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._folder, self._shapes = start.folder, shapes
        self._files = files_of(start.folder)
        stored = {name for names in self._files.values() for name in names}
        self._names = stored_names(start.model, stored)
        check_names(start.folder, stored, set(self._names.values()))

    def fill(self, targets: Targets) -> None:
        """Fill tensors from the boxes of the stored ones."""
        ours = {self._names[name]: name for name in targets}
        for path, stored in self._files.items():
            for theirs, tensor in self._open(path, {n: targets[ours[n]][0] for n in stored & ours.keys()}):
                targets[ours[theirs]][1].copy_(tensor)

    def _open(self, path: Path, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        if not boxes:
            return
        ours = {theirs: name for name, theirs in self._names.items()}
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name, box in boxes.items():
                    stored = file.get_slice(name)
                    shape, expected = tuple(stored.get_shape()), self._shapes[ours[name]]
                    if shape != expected:
                        raise ModelError(
                            f"{name} in {path} has shape {shape}, but config.json makes it {expected}",
                            fix="Take config.json and the weights from one download of the model.",
                        )
                    some = zip(box.offsets, box.sizes, strict=True)
                    tensor: Tensor = stored[tuple(slice(first, first + size) for first, size in some)]
                    check_dtype(self._folder, name, tensor)
                    yield name, tensor
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged: {error}", fix="Download or export it again.") from error

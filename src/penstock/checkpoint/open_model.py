"""Opening a checkpoint as a model, whole or a tensor-parallel rank's part of it."""

from pathlib import Path

from torch import nn

from penstock.checkpoint.adapter_run import merged_model
from penstock.checkpoint.find import find
from penstock.checkpoint.layout import MODEL
from penstock.checkpoint.load import fill_boxes
from penstock.core.boxes import Box
from penstock.core.files import TOKENIZER_FILE
from penstock.models import FAMILIES
from penstock.models.decoder.tensor_slices import ALONE, Slice, TensorParallelRank, slice_of, sliced_config
from penstock.nn.unfilled import on_device, unfilled


def open_model(
    path: Path | str, *, step: int | None = None, place: TensorParallelRank = ALONE
) -> tuple[nn.Module, Path | None]:
    """Open the model of a checkpoint, or of a run's newest one: float32, on the CPU.

    If the run tunes an adapter, it is merged into the weights that the run started from.

    Args:
        step: step of a run's checkpoint, instead of the newest.
        place: part of each matrix to read; the model is then that part.

    Returns:
        The model in evaluation mode, and its tokenizer.json if the run has one.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; or it is an adapter's, and its base is
            gone.
    """
    path = Path(path)
    saved = find(path, step=step)
    index = saved.index()
    whole = index.meta.model
    with unfilled():
        model: nn.Module = FAMILIES[whole.model_type](sliced_config(whole, place))
    model = on_device(model)
    parts = {
        name: (_box(slice_of(name, whole, place), tuple(tensor.shape)), tensor)
        for name, tensor in model.state_dict().items()
    }
    if index.meta.adapter is None:
        fill_boxes(saved, index, {f"{MODEL}{name}": part for name, part in parts.items()})
    else:  # whole even for a slice: merging needs whole rows
        merged = merged_model(saved, index).state_dict()
        for name, (box, tensor) in parts.items():
            stored = merged.pop(name)
            tensor.copy_(stored[box.within(Box((0,) * stored.ndim, tuple(stored.shape)))])
    folders = (path, path.parent.parent)  # a run, or a checkpoint inside one
    tokenizer = next((found for folder in folders if (found := folder / TOKENIZER_FILE).is_file()), None)
    return model.eval(), tokenizer


def _box(part: Slice | None, shape: tuple[int, ...]) -> Box:
    """Return the box of a slice of that shape within its tensor."""
    dim, run = part if part is not None else (0, range(0))
    return Box(tuple(run.start if d == dim else 0 for d in range(len(shape))), shape)

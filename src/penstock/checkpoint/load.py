"""Loading a checkpoint into a training state of any layout on any number of ranks.

Each rank reads the headers of all files, then the bytes that its own boxes share with stored parts, and
verifies them. There is no communication here; resume.py makes the ranks agree.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from penstock.checkpoint.find import SavedCheckpoint
from penstock.checkpoint.layout import CheckpointIndex, damaged
from penstock.checkpoint.reader import ShardReader, TensorRead
from penstock.checkpoint.shard_file import Stored
from penstock.checkpoint.tensors import DTYPES, held
from penstock.core.boxes import Box, overlaps, span, strides
from penstock.core.errors import CheckpointError


def load_into(saved: SavedCheckpoint, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, whatever layout they were saved in and have now.

    Raises:
        CheckpointDamaged: stored data was altered; some tensors may have been filled.
        CheckpointError: the checkpoint has other tensors or shapes.
    """
    index = saved.index()
    _check_tensors(saved, index, tensors)
    fill_boxes(saved, index, {name: held(name, tensor) for name, tensor in tensors.items()})


def fill_boxes(
    saved: SavedCheckpoint, index: CheckpointIndex, targets: Mapping[str, tuple[Box, Tensor]]
) -> None:
    """Fill tensors from boxes of the stored ones, by name; other bytes are not read.

    Raises:
        CheckpointDamaged: stored data was altered or is missing.
    """
    missing = {name: box.num_elements for name, (box, _) in targets.items()}
    for file, entry in index.files.items():
        reader = ShardReader(saved, file, entry)
        stored, wanted = reader.header().parts, []
        for name in stored.keys() & targets.keys():
            box, local = targets[name]
            for which, shared in overlaps(box, [part.box for part in stored[name]]):
                wanted.append(_wanted(stored[name][which], shared, local[shared.within(box)]))
                missing[name] -= shared.num_elements
        reader.fetch(wanted)
    for name, count in missing.items():
        if count:
            raise damaged(f"Checkpoint {saved}", f"its files lack {count:,} elements of {name}")


def _wanted(part: Stored, shared: Box, room: Tensor) -> TensorRead:
    """Return the read that fills `room` with the overlap of a stored part."""
    run, dtype = span(shared, part.box), DTYPES[part.dtype]
    start = part.start + run.start * dtype.itemsize
    take = partial(_fill, room, dtype, strides(part.box.sizes))
    return TensorRead(start, start + len(run) * dtype.itemsize, take)


def _fill(room: Tensor, dtype: torch.dtype, steps: tuple[int, ...], content: memoryview) -> None:
    room.copy_(torch.frombuffer(content, dtype=dtype).as_strided(room.shape, steps))


def _check_tensors(saved: SavedCheckpoint, index: CheckpointIndex, tensors: Mapping[str, Tensor]) -> None:
    absent = sorted(tensors.keys() - index.tensors.keys())
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CheckpointError(
            f"Checkpoint {saved} has no {absent[0]}{more}",
            fix="Resume with the model and optimizer it was saved with, or choose another run.dir.",
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != index.tensors[name].shape:
            raise CheckpointError(
                f"Checkpoint {saved} has {name} of shape {index.tensors[name].shape}",
                got=tuple(tensor.shape),
                fix="Resume with the model it was saved with.",
            )

"""What each rank wrote of a checkpoint, and the index that makes one of it."""

from dataclasses import dataclass
from math import prod

from penstock.checkpoint.layout import FileEntry, Index, Meta, TensorEntry
from penstock.checkpoint.tensors import DTYPES
from penstock.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank wrote."""

    name: str
    file: FileEntry
    tensors: dict[str, TensorEntry]
    """Those of which it wrote the first element."""


def index_of(meta: Meta, written: list[Written]) -> Index:
    """Return the index of what all ranks wrote.

    Raises:
        CheckpointError: it is not the whole of every tensor, or more than that.
    """
    tensors = {name: entry for each in written for name, entry in each.tensors.items()}
    expected = sum(prod(entry.shape) * DTYPES[entry.dtype].itemsize for entry in tensors.values())
    found = sum(each.file.num_bytes - each.file.header_bytes for each in written)
    if found != expected:
        raise CheckpointError(
            f"The ranks wrote {found:,} bytes of tensors that have {expected:,}",
            fix="Write to the authors: a tensor is laid out in a way that the saver does not understand.",
        )
    files = {each.name: each.file for each in written}
    return Index(meta=meta, tensors=dict(sorted(tensors.items())), files=files)

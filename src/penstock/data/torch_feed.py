"""numpy batches to torch tensors; the only torch in data/."""

import numpy as np
import torch

from penstock.data.types import Batch


def to_tensors(batch: Batch, *, pin_memory: bool) -> dict[str, torch.Tensor]:
    """Return a batch's fields as CPU tensors of the same shapes and dtypes.

    The tensors share the batch's memory. With `pin_memory` they are copied into page-locked memory,
    from which a copy to a GPU can overlap with compute.
    """
    tensors = {name: torch.from_numpy(np.ascontiguousarray(field)) for name, field in batch.fields.items()}
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin_memory else tensors

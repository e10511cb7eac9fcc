"""Upload of a step's small arrays: one copy to the device, which the host does not wait for.

The arrays are packed into pinned memory of torch's allocator, which does not hand that memory out again
before the copy is done. So the next upload may be packed while this one is in flight.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.devices import accelerator

_ALIGNED = 16
"""Bytes; vector loads of kernels need no more."""


def uploaded(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors on a device, views of one upload; on CPUs they share the arrays' memory."""
    if not accelerator.is_accelerator(device):
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    starts, size = places_of([array.nbytes for array in arrays])
    packed = pinned(size, device)
    memory = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_dtype_of(array)).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def places_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned start of each part of an upload, and the size of the whole, in bytes.

    >>> places_of([8, 20, 4])
    ([0, 16, 48], 64)
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return starts, end


def pinned(size: int, device: torch.device) -> Tensor:
    """Return uninitialised bytes on the host; pinned, if copies to and from `device` need that."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=accelerator.is_accelerator(device))


def _dtype_of(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(array[:0].reshape(-1)).dtype

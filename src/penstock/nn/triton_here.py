"""Whether kernels in Triton can run: torch brings it along on Linux, and their products need an Ampere."""

from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def has_triton(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU that kernels in Triton are made for."""
    return device.type == "cuda" and _is_made_for(device.index)


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Launch on the device that holds a tensor: Triton does on the thread's, whatever it is handed."""
    found: AbstractContextManager[None] = torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return found


@cache
def _is_made_for(index: int | None) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(index) >= (8, 0)

"""Detection of devices that can run Triton kernels (NVIDIA, Ampere or newer)."""

from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def has_triton(device: torch.device) -> bool:
    """True if the device is an NVIDIA GPU that the Triton kernels support."""
    return device.type == "cuda" and _is_made_for(device.index)


# What torch.compiler.assume_constant_result sets; calling that imports the compiler, a second of every start.
has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Context in which Triton launches on the tensor's device; by default it uses the thread's device."""
    found: AbstractContextManager[None] = torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return found


@cache
def _is_made_for(index: int | None) -> bool:
    is_nvidia = torch.version.hip is None
    return is_nvidia and find_spec("triton") is not None and torch.cuda.get_device_capability(index) >= (8, 0)

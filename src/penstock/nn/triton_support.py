"""Detection of devices that can run Triton kernels (NVIDIA, Ampere or newer), with a Triton that compiles.

Triton needs a C compiler and its own ptxas. Where either fails, kernels of torch compute.
"""

from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from penstock.core.log import EventLog

log = EventLog(__name__)


def has_triton(device: torch.device) -> bool:
    """True if the device is an NVIDIA GPU that the Triton kernels support."""
    return device.type == "cuda" and _is_made_for(device.index)


# What torch.compiler.assume_constant_result sets; calling that imports the compiler, a second of every start.
has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Context in which Triton launches on the tensor's device; by default it uses the thread's device."""
    found: AbstractContextManager[None] = torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return found


def compiles(device: torch.device) -> bool:
    """True unless the device is a GPU for which Triton, and so torch's compiler, fails: the log says why."""
    if device.type != "cuda":
        return True
    return _compiles(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _compiles(index: int) -> bool:
    x = torch.ones(1, device=torch.device("cuda", index))
    try:
        from penstock.nn.probe_triton import launch  # loads Triton

        with on_device_of(x):
            launch(x)
    except Exception as error:  # compilers and drivers raise anything
        log.warning(
            "triton_fails",
            "Triton compiles no kernel for this GPU, so kernels of torch compute, without CUDA graphs of "
            "steps and without compiled blocks: {error}",
            error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
        )
        return False
    return True


@cache
def _is_made_for(index: int | None) -> bool:
    is_nvidia = torch.version.hip is None
    has_package = is_nvidia and find_spec("triton") is not None
    is_new = has_package and torch.cuda.get_device_capability(index) >= (8, 0)
    return is_new and _compiles(torch.cuda.current_device() if index is None else index)

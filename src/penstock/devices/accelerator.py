"""Accelerator of this process, over torch.accelerator; the CPU if there is none.

Differences between device types are rows of KINDS; the rest of Penstock uses this module and names no type.
Elsewhere, `cuda` appears only for NVIDIA-specific code: kernels for its compute capabilities
(`nn/triton_support.py`, `nn/linear/float8.py`, `nn/kernels/varlen_torch.py`, `nn/kernels/paged.py`), CUDA
graphs (`engine/model_runner/decode_graphs.py`), its driver (`doctor/checks/devices.py`). AMD's GPUs are
`cuda` too, in a torch for ROCm. Apple's `mps` has no process group, so the CPU computes there.

Penstock was tested with the rows `cpu` and `cuda`; the others follow torch's documentation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import UsageError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Properties of a device type in torch."""

    backend: str
    """Backend of process groups."""
    activity: str | None = None
    """Member of torch.profiler.ProfilerActivity that records its kernels; None: only the CPU's."""
    has_graphs: bool = False
    """True if a step can be captured and replayed (engine/model_runner/decode_graphs.py)."""
    adds_to_float32: bool = False
    """True if `torch.addmm` adds a product of bfloat16 matrices to a float32 sum, unrounded."""
    has_history: bool = False
    """True if its allocator can record a history."""
    locks_pages: bool = False
    """True if it can page-lock memory that the process already has."""


KINDS: Mapping[str, Kind] = {
    "cpu": Kind(backend="gloo"),
    "cuda": Kind(
        backend="nccl",
        activity="CUDA",
        has_graphs=True,
        adds_to_float32=torch.version.hip is None,
        has_history=True,
        locks_pages=True,
    ),
    "xpu": Kind(backend="xccl", activity="XPU"),
    "hpu": Kind(backend="hccl", activity="HPU"),
    "npu": Kind(backend="hccl", activity="PrivateUse1"),
}
"""Device types by torch's name."""


@cache
def _type() -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in KINDS else None


def is_available() -> bool:
    """Return True if this machine has an accelerator that Penstock can use."""
    return _type() is not None


def count() -> int:
    """Return the number of accelerators; 0 if the CPU computes."""
    return torch.accelerator.device_count() if is_available() else 0


def choose(index: int | None = None) -> torch.device:
    """Return the accelerator, optionally by its index on this machine; the CPU if there is none.

    >>> choose(3) if not is_available() else CPU
    device(type='cpu')

    Raises:
        UsageError: the index is too large.
    """
    found = _type()
    if found is None:
        return CPU
    if index is None:
        return torch.device(found)
    if index >= count():
        raise UsageError(
            f"Each process of a machine takes an accelerator of its own, and {count()} can be used here",
            got=f"process {index + 1}",
            fix=f"Start at most {count()} (--processes), or hide them and train on processors: "
            "CUDA_VISIBLE_DEVICES= before the command.",
        )
    return torch.device(found, index)


def use(device: torch.device) -> None:
    """Make an accelerator the current one of this thread; nothing for a CPU."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def is_accelerator(device: torch.device | str) -> bool:
    """Return True if a device, or a device type, is a known accelerator.

    >>> is_accelerator("cpu"), is_accelerator("meta"), is_accelerator(torch.device("xpu", 1))
    (False, False, True)
    """
    of_type = device if isinstance(device, str) else device.type
    return of_type in KINDS and of_type != CPU.type


def kind_of(device: torch.device | str) -> Kind:
    """Return the row of a device or device type; the CPU's for one that is no accelerator ("meta")."""
    of_type = device if isinstance(device, str) else device.type
    return KINDS.get(of_type, KINDS[CPU.type])


def backend_of(device: torch.device | str) -> str:
    """Return the backend for process groups: gloo for CPU tensors, and the device's own.

    >>> backend_of(CPU), backend_of("xpu")
    ('gloo', 'cpu:gloo,xpu:xccl')
    """
    host = kind_of(CPU).backend
    if not is_accelerator(device):
        return host
    of_type = device if isinstance(device, str) else device.type
    return f"{CPU.type}:{host},{of_type}:{kind_of(device).backend}"


def name_of(device: torch.device) -> str:
    """Return the driver's name of a device; "cpu" for a CPU."""
    return str(_module(device).get_device_name(device)) if is_accelerator(device) else device.type


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return an accelerator's free memory (of all processes) and total memory in bytes."""
    free, total = torch.accelerator.get_memory_info(device)
    return free, total


def peak_bytes(device: torch.device) -> int:
    """Return the peak bytes of this process's tensors on an accelerator since `forget_peak`."""
    return torch.accelerator.max_memory_allocated(device)


def forget_peak(device: torch.device) -> int:
    """Free cached memory and reset the peak; return the bytes that tensors use now."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    return torch.accelerator.memory_allocated(device)


def free_cache() -> None:
    """Free the memory cached by the accelerator's allocator."""
    torch.accelerator.empty_cache()


def wait(device: torch.device) -> None:
    """Wait until a device has finished its work; nothing for a CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def wait_for_stream(device: torch.device) -> None:
    """Wait for the current stream of a device only; nothing for a CPU."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


def lock_pages(memory: Tensor, device: torch.device) -> bool:
    """Page-lock host memory for fast copies from and to a device; return False if it cannot.

    Raises:
        RuntimeError: the driver refuses.
    """
    if not (is_accelerator(device) and kind_of(device).locks_pages):
        return False
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return True


def unlock_pages(memory: Tensor, device: torch.device) -> None:
    """Undo `lock_pages`."""
    with torch.cuda.device(device):
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(driver.cudaHostUnregister(memory.data_ptr()))


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Return a function that replays the kernels of a call as a CUDA graph; a device that `has_graphs`.

    Call it once before: what starts a library cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        kept = call()  # the graph writes to its tensors

    def replay() -> None:
        assert kept is not None
        graph.replay()

    return replay


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of the host and of this process's device.

    `torch.manual_seed` also queues the seed for each device type that has not been started, with a formatted
    stack: 0.2 ms a call, 0.5 ms in a deep stack.

    Args:
        seed: below 2**63.
    """
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        _module(device).manual_seed(seed)


def timed_event(of_type: str) -> torch.Event:
    """Return an accelerator event recorded on the current stream; two events give the time between them."""
    event: torch.Event = _module(of_type).Event(enable_timing=True)
    event.record()
    return event


def record_history(device: torch.device, *, is_on: bool = True) -> None:
    """Start or stop the allocator history of a device that `has_history`."""
    _module(device).memory._record_memory_history(**({} if is_on else {"enabled": None}), device=device)


def write_history(device: torch.device, path: str) -> None:
    """Write the allocator history, for pytorch.org/memory_viz."""
    _module(device).memory._dump_snapshot(path)


def _module(device: torch.device | str) -> Any:  # Any: torch.cuda, torch.xpu... have no common type
    return torch.get_device_module(device)

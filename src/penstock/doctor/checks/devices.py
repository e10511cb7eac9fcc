"""Check: accelerators, their driver, and whether torch can use them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.core.env import num_cores
from penstock.core.units import mib
from penstock.doctor.checks.check import CheckOptions, Finding, green, red, yellow
from penstock.doctor.checks.proc_files import text_of

CHECK = "devices"

_NVIDIA = Path("/proc/driver/nvidia")
_FREE_SHARE = 0.9
"""Share of free memory below which another process must be using the device; a CUDA context takes 1%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedDevice:
    """Accelerator."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability: 9.0 is Hopper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Devices, and the versions of torch and driver."""

    torch: str
    cuda: str = ""
    """CUDA version of the torch build; empty: built without CUDA."""
    nccl: str = ""
    driver: str = ""
    """Version of NVIDIA's driver; empty: not loaded."""
    num_cards: int = 0
    """Number of cards that the driver sees."""
    devices: tuple[DetectedDevice, ...] = ()
    """Devices that torch sees."""
    cores: int = 1


def measure(_options: CheckOptions) -> DeviceFacts:
    """Query torch and the driver."""
    cuda = torch.cuda.is_available()
    version = torch.cuda.nccl.version() if cuda else ()  # type: ignore[no-untyped-call]
    return DeviceFacts(
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, version)),
        driver=driver_version(text_of(_NVIDIA / "version")),
        num_cards=len(list((_NVIDIA / "gpus").glob("*"))),
        devices=tuple(_device(index) for index in range(torch.cuda.device_count())) if cuda else (),
        cores=num_cores(),
    )


def _device(index: int) -> DetectedDevice:
    free, total = torch.cuda.mem_get_info(index)
    return DetectedDevice(
        name=torch.cuda.get_device_name(index),
        memory_bytes=total,
        free_bytes=free,
        capability=torch.cuda.get_device_capability(index),
    )


def driver_version(text: str) -> str:
    """Return the version in the text of /proc/driver/nvidia/version.

    >>> driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5")
    '550.54.15'
    """
    words = text.partition("Module")[2].split()
    return next((word for word in words if word[0].isdigit()), "")


def judge(facts: DeviceFacts) -> Iterator[Finding]:
    """Compare the devices that torch sees with those of the driver."""
    if not facts.devices:
        yield from _without(facts)
        return
    names = sorted({device.name for device in facts.devices})
    memory = min(device.memory_bytes for device in facts.devices)
    versions = (
        f"torch {facts.torch}, CUDA {facts.cuda}, NCCL {facts.nccl}, driver {facts.driver or 'unknown'}"
    )
    yield green(f"{len(facts.devices)} x {' and '.join(names)}, {mib(memory)} each; {versions}")
    if len(names) > 1:
        yield yellow(
            f"The devices differ: {', '.join(names)}",
            remedy="A step takes as long as on the slowest: run on devices of one kind.",
        )
    if len(facts.devices) < facts.num_cards:
        yield yellow(
            f"torch sees {len(facts.devices)} of {facts.num_cards} cards",
            remedy="Check CUDA_VISIBLE_DEVICES and what the container was given.",
        )
    for index, device in enumerate(facts.devices):
        if device.free_bytes < _FREE_SHARE * device.memory_bytes:
            yield yellow(
                f"Device {index} has {mib(device.free_bytes)} of {mib(device.memory_bytes)} free",
                remedy="End the process that holds the rest: see nvidia-smi.",
            )


def _without(facts: DeviceFacts) -> Iterator[Finding]:
    if facts.num_cards and not facts.cuda:
        yield red(
            f"The driver sees {facts.num_cards} cards; torch {facts.torch} was built without CUDA",
            remedy="Install a build of torch for CUDA: see pytorch.org.",
        )
    elif facts.num_cards:
        yield red(
            f"The driver {facts.driver} sees {facts.num_cards} cards; torch {facts.torch} for CUDA "
            f"{facts.cuda} can use none",
            remedy="Update the driver, or install a build of torch for an older CUDA; check nvidia-smi.",
        )
    else:
        yield green(f"No accelerator: {facts.cores} CPU cores, torch {facts.torch}")

"""Check: speed of copies between host memory and each accelerator, over PCIe, if no job uses it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.core import clock
from penstock.devices import accelerator
from penstock.doctor.checks.check import CheckOptions, Finding, green, yellow

CHECK = "copies"

_BYTES = 2**27
_REPEATS = 5
_SLOW, _MIN_BYTES_S = 0.7, 5e9
"""Share of the fastest device's speed, and bytes per second, below which a copy is slow. 16 lanes of PCIe 3
give 12 GB/s, of PCIe 4 25; 4 lanes of PCIe 3, or 16 of a link that stays at its idle speed, less than 4."""
_FREE_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCopies:
    """Copy speeds of one device."""

    index: int
    is_in_use: bool = False
    """True if another process holds its memory: it was not measured."""
    to_bytes_s: float = 0.0
    from_bytes_s: float = 0.0


def measure(_options: CheckOptions) -> tuple[DeviceCopies, ...]:
    """Copy pinned memory to each free device and back."""
    return tuple(_measured(index) for index in range(accelerator.count()))


def _measured(index: int) -> DeviceCopies:
    device = accelerator.choose(index)
    free, total = accelerator.free_and_total_bytes(device)
    if free < _FREE_SHARE * total:
        return DeviceCopies(index=index, is_in_use=True)
    here = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=device, pin_memory=False)
    return DeviceCopies(
        index=index, to_bytes_s=_speed(here, there, device), from_bytes_s=_speed(there, here, device)
    )


def _speed(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        start = clock.monotonic()
        target.copy_(source, non_blocking=True)
        accelerator.wait(device)
        best = min(best, clock.monotonic() - start)
    return _BYTES / best


def judge(facts: tuple[DeviceCopies, ...]) -> Iterator[Finding]:
    """Compare the devices with one another, and with the least that a sound slot gives."""
    if not facts:
        yield green("No accelerator to copy to")
        return
    measured = [device for device in facts if not device.is_in_use]
    if in_use := [str(device.index) for device in facts if device.is_in_use]:
        yield green(f"Not measured, because a job uses them: devices {', '.join(in_use)}")
    fine = True
    for way, speeds in (
        ("to", {device.index: device.to_bytes_s for device in measured}),
        ("from", {device.index: device.from_bytes_s for device in measured}),
    ):
        wanted = max([_MIN_BYTES_S, *(_SLOW * speed for speed in speeds.values())])
        for index, speed in speeds.items():
            if speed < wanted:
                fine = False
                yield yellow(
                    f"Copies {way} device {index} run at {speed / 1e9:.3g} GB/s, below {wanted / 1e9:.3g}",
                    remedy="Check the lanes and speed of its slot (nvidia-smi -q -d PCIE), and that the "
                    "process runs on the socket that the card is attached to.",
                )
    if measured and fine:
        slowest = min(min(device.to_bytes_s, device.from_bytes_s) for device in measured)
        yield green(f"Copies to and from each device run at {slowest / 1e9:.3g} GB/s or more")

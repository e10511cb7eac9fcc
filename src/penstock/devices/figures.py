"""Data sheets of devices: peak FLOP/s, memory, links; one table for planner and MFU; no torch.

Dense products (no structured sparsity), memory in both directions, links in one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError

Architecture = Literal["cpu", "volta", "ampere", "ada", "hopper", "blackwell"]

_SAME_MEMORY = 0.12
"""Tolerance: torch reports up to this share less memory than the data sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device: a GPU, or the share of a machine's CPU that one rank has."""

    name: str
    architecture: Architecture
    """Determines the share of the peaks that large products reach."""
    memory_gib: float
    memory_gb_s: float
    """Both directions together, in 10^9 bytes per second."""
    bfloat16_tflops: float
    """Dense, with float32 accumulation."""
    float32_tflops: float
    float8_tflops: float = 0.0
    """0: no 8-bit products."""
    link_gb_s: float = 0.0
    """Speed to the other devices of its machine, in one direction: NVLink, else PCIe."""
    power_share: float = 1.0
    """Power limit relative to the data sheet's; clocks follow its cube root."""
    launch_us: float = 6.0
    """Host time to launch one kernel: a lower bound of an eager step."""
    operation_us: float = 0.0
    """CPU: fixed time of one collective, beyond the network's latency."""
    copy_gb_s: float = 0.0
    """CPU: bytes per second that a rank copies into and out of sockets, at the expense of computing. 0: a
    device whose links need no copies."""

    def __post_init__(self) -> None:
        for name in ("memory_gib", "memory_gb_s", "bfloat16_tflops", "float32_tflops", "power_share"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"device.{name} must be above 0", got=getattr(self, name))
        for name in ("float8_tflops", "link_gb_s", "launch_us", "operation_us", "copy_gb_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"device.{name} must be 0 or more", got=getattr(self, name))


def _gpu(name: str, architecture: Architecture, figures: str, *, power_share: float = 1.0) -> Device:
    """Parse memory GiB / memory GB/s / bfloat16 / float32 / float8 TFLOP/s / link GB/s."""
    memory, bandwidth, bfloat16, float32, float8, link = map(float, figures.split("/"))
    return Device(
        name=name,
        architecture=architecture,
        memory_gib=memory,
        memory_gb_s=bandwidth,
        bfloat16_tflops=bfloat16,
        float32_tflops=float32,
        float8_tflops=float8,
        link_gb_s=link,
        power_share=power_share,
    )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("V100-32GB", "volta", "32/900/125/15.7/0/150"),  # its 125 are float16
        _gpu("A10G", "ampere", "24/600/70/31/0/32"),
        _gpu("A100-40GB", "ampere", "40/1555/312/19.5/0/300"),
        _gpu("A100-80GB", "ampere", "80/2039/312/19.5/0/300"),
        _gpu("L4", "ada", "24/300/121/30/242/32"),
        _gpu("L40S", "ada", "48/864/362/91.6/733/32"),
        _gpu("H100-80GB", "hopper", "80/3350/989/67/1979/450"),
        _gpu("H100-PCIe", "hopper", "80/2000/756/51/1513/64"),
        _gpu("H100-96GB-500W", "hopper", "96/2400/989/67/1979/450", power_share=500 / 700),
        _gpu("H200", "hopper", "141/4800/989/67/1979/450"),
        _gpu("B200", "blackwell", "180/8000/2250/80/4500/900"),
        Device(
            name="CPU",
            architecture="cpu",
            memory_gib=16,
            memory_gb_s=20,
            bfloat16_tflops=0.05,
            float32_tflops=0.05,
            link_gb_s=2.0,
            launch_us=5.0,
            operation_us=200.0,
            copy_gb_s=0.6,
        ),
    )
}
"""Devices by name. H100-96GB-500W is that of Meta's Grand Teton machines (HBM2e), on which torchtitan's
figures were measured. CPU is a placeholder: `penstock doctor` measures the machine's own."""


_PEAKS_ALONE: Mapping[str, float] = {"GH200": 989.0, "A10": 125.0, "MI300X": 1307.0}
"""bfloat16 TFLOP/s of devices without planner data."""


def bfloat16_tflops(name: str) -> float | None:
    """Return the dense bfloat16 TFLOP/s of a GPU by its driver's name; None if unknown.

    >>> bfloat16_tflops("NVIDIA H100 PCIe"), bfloat16_tflops("AMD Instinct MI300X")
    (756.0, 1307.0)
    >>> bfloat16_tflops("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), bfloat16_tflops("Tesla V100-SXM2-32GB")
    (None, None)
    """
    words = re.split(r"[ -]", name)
    if "MIG" in words:  # a part of a card
        return None
    rows = (row for row in DEVICES.values() if row.architecture not in ("cpu", "volta"))  # Volta emulates it
    known = [row.bfloat16_tflops for row in rows if _is_row(row, words)]
    return next(iter(known + [_PEAKS_ALONE[word] for word in words if word in _PEAKS_ALONE]), None)


def _is_row(row: Device, words: list[str]) -> bool:
    family, *rest = row.name.split("-")
    return family in words and ("PCIe" in rest) == ("PCIe" in words and family == "H100")


def device_named(name: str, *, memory_gib: float) -> Device | None:
    """Return the planner's device by its driver's name; None if there is no data.

    Words must match: an L40 is not an L4, and a part of a card (MIG) is not the card.


    >>> device_named("NVIDIA A100-SXM4-80GB", memory_gib=79.3).name
    'A100-80GB'
    >>> device_named("NVIDIA H100 PCIe", memory_gib=79.2).name
    'H100-PCIe'
    """
    words = re.split(r"[ -]", name)
    for row in DEVICES.values():
        if _is_row(row, words) and abs(memory_gib / row.memory_gib - 1) < _SAME_MEMORY:
            return row
    return None

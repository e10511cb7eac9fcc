"""Check: compute and copy speeds of the devices, for the planner; a short measurement, not a benchmark."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.core import clock
from penstock.devices import accelerator
from penstock.doctor.checks.check import CheckOptions, Finding, green
from penstock.obs.peak import peak_flops

CHECK = "speeds"

_COPY_BYTES = 2**26
_REPEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """Speeds of one process with all its threads, or of one accelerator."""

    kind: str
    """Device type in torch: cpu, cuda..."""
    float32_flops: float
    bfloat16_flops: float
    memory_bytes_s: float
    """Bytes read plus bytes written per second."""
    link_bytes_s: float = 0.0
    """Copy speed to another accelerator of this machine; 0: there is none."""


def measure(_options: CheckOptions) -> SpeedFacts:
    """Multiply matrices and copy memory for a moment."""
    device = accelerator.choose(0)
    others = accelerator.choose(1) if accelerator.count() > 1 else None
    return SpeedFacts(
        kind=device.type,
        float32_flops=peak_flops(device, torch.float32),
        bfloat16_flops=peak_flops(device, torch.bfloat16),
        memory_bytes_s=2 * _copied_bytes_s(device, device),
        link_bytes_s=_copied_bytes_s(device, others) if others else 0.0,
    )


def _copied_bytes_s(source: torch.device, target: torch.device) -> float:
    content = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=source)
    copy = torch.empty_like(content, device=target)
    best = float("inf")
    for _ in range(_REPEATS):
        start = clock.monotonic()
        copy.copy_(content)
        accelerator.wait(source)
        accelerator.wait(target)
        best = min(best, clock.monotonic() - start)
    return _COPY_BYTES / best


def judge(facts: SpeedFacts) -> Iterator[Finding]:
    """Report the speeds."""
    link = f", {facts.link_bytes_s / 1e9:.3g} GB/s to another device" if facts.link_bytes_s else ""
    yield green(
        f"{facts.kind}: {facts.float32_flops / 1e12:.3g} TFLOP/s in float32, "
        f"{facts.bfloat16_flops / 1e12:.3g} in bfloat16, memory {facts.memory_bytes_s / 1e9:.3g} GB/s{link}"
    )

"""Check: what the devices compute and copy, for the planner; short, so a hint rather than a benchmark."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.core import clock
from penstock.doctor.check import Asked
from penstock.doctor.finding import Finding, green
from penstock.obs.peak import peak_flops

CHECK = "speeds"

_COPY_BYTES = 2**26
_REPEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Speeds of one process, with all its threads, or of one accelerator."""

    kind: str
    """Of the device: cuda or cpu."""
    float32_flops: float
    bfloat16_flops: float
    memory_bytes_s: float
    """Read and written, together."""
    link_bytes_s: float = 0.0
    """From one accelerator to another of this machine; 0: there is one at most."""


def measure(_asked: Asked) -> Facts:
    """Multiply and copy for a moment."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    others = torch.device("cuda", 1) if cuda and torch.cuda.device_count() > 1 else None
    return Facts(
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
        if source.type == "cuda":
            torch.cuda.synchronize(source)
            torch.cuda.synchronize(target)
        best = min(best, clock.monotonic() - start)
    return _COPY_BYTES / best


def judge(facts: Facts) -> Iterator[Finding]:
    """Say them."""
    link = f", {facts.link_bytes_s / 1e9:.3g} GB/s to another device" if facts.link_bytes_s else ""
    yield green(
        CHECK,
        f"{facts.kind}: {facts.float32_flops / 1e12:.3g} TFLOP/s in float32, "
        f"{facts.bfloat16_flops / 1e12:.3g} in bfloat16, memory {facts.memory_bytes_s / 1e9:.3g} GB/s{link}",
    )

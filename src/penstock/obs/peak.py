"""What a device could do at best: the denominator of MFU."""

import re

import torch

from penstock.core import clock

# Dense bfloat16 FLOP/s by the vendors' data sheets; matched in order, by words of the device's name.
# The planner has the rows with memory and links (plan/hardware.py), which is above this layer.
_PEAK_BF16 = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "GH200": 989e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "MI300X": 1307e12,
}  # fmt: skip

_SIZE, _REPEATS, _LONG_S = 1024, 6, 0.5


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a device: from a table for GPUs computing in bfloat16, else measured.

    Measured is the best of a few matrix products of 1,024 x 1,024, with this process's threads; one
    product, where it takes long.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        known = known_peak_flops(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return _measured(device, dtype)


def known_peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU by its driver's name for it; None where it is not known.

    >>> known_peak_flops("NVIDIA H100 80GB HBM3"), known_peak_flops("NVIDIA L40")
    (989000000000000.0, None)
    """
    matching = (peak for words, peak in _PEAK_BF16.items() if re.search(rf"\b{words}\b", name))
    return next(matching, None)


@torch.no_grad()
def _measured(device: torch.device, dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIZE, _SIZE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(_REPEATS):
        start = clock.monotonic()
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock.monotonic() - start)
        if best > _LONG_S:
            break
    return float(2 * _SIZE**3 / best)

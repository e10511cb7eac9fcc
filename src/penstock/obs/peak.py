"""What a device could do at best: the denominator of MFU."""

import torch

from penstock.core import clock

# Dense bfloat16 FLOP/s by the vendors' data sheets; matched in order, by part of the device's name.
_PEAK_BF16 = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "MI300X": 1307e12,
}  # fmt: skip

_LONG_S = 0.5


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a device: from a table for GPUs computing in bfloat16, else measured.

    Measured is the best of a few matrix products of 1,024 x 1,024, with this process's threads; one
    product, where it takes long.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in _PEAK_BF16.items():
            if part in name:
                return peak
    return _measured(device, dtype)


@torch.no_grad()
def _measured(device: torch.device, dtype: torch.dtype, *, size: int = 1024, repeats: int = 6) -> float:
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        start = clock.monotonic()
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock.monotonic() - start)
        if best > _LONG_S:
            break
    return float(2 * size**3 / best)

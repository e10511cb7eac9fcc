"""Peak FLOP/s of a device: the denominator of MFU.

Without a data sheet it is measured: the best of several matrix products on all threads of this process. A
measurement counts only if it was undisturbed: the best three agree, and the threads had their cores to
themselves. A peak measured beside other work is too low, and every MFU computed from it too high.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.core import clock
from penstock.devices import accelerator
from penstock.devices.figures import bfloat16_tflops

_SMALLEST, _LARGEST = 256, 8192
_LONG_ENOUGH_S = 0.008
"""Minimum duration of a product in seconds; below it, the fixed cost of a call would count."""
_ROUNDS, _MAX_S = 6, 0.3
"""Number of measured rounds, and the seconds after which no more are tried to find undisturbed ones."""
_AGREE, _BUSY = 0.05, 0.85
"""Tolerance between the best three rounds, and minimum share of a round that each thread computed."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak of a device."""

    flops: float
    """Peak in FLOP/s."""
    is_calm: bool
    """True if it is reliable: from a data sheet, or measured without other load."""


@dataclass(frozen=True, slots=True)
class Round:
    """One timed matrix product."""

    seconds: float
    cpu_s: float
    """CPU seconds of the process's threads during the product."""


def measure_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of a device: from a table for GPUs computing in bfloat16, else measured.

    Ranks that share a machine must call it at the same time, so that each measures the cores it trains with.
    """
    if accelerator.is_accelerator(device) and dtype == torch.bfloat16:
        known = known_peak_flops(accelerator.name_of(device))
        if known is not None:
            return Peak(known, is_calm=True)
    return _measured(device, dtype)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a device as `measure_peak` does, reliable or not."""
    return measure_peak(device, dtype).flops


def is_calm(rounds: Sequence[Round], *, threads: int) -> bool:
    """Return True if no other process computed during the best of some rounds.

    >>> alone = [Round(1.00, 1.96), Round(1.02, 2.0), Round(1.04, 2.0), Round(3.0, 2.1)]
    >>> is_calm(alone, threads=2), is_calm(alone[2:], threads=2)
    (True, False)
    >>> is_calm([Round(2.0, 2.2)] * 3, threads=2)  # a neighbour has most of a core
    False
    """
    best = sorted(rounds, key=lambda each: each.seconds)[:3]
    if len(best) < 3 or best[-1].seconds > (1 + _AGREE) * best[0].seconds:
        return False
    return all(each.cpu_s >= _BUSY * threads * each.seconds for each in best)


def known_peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU by its driver's name; None if unknown.

    >>> known_peak_flops("NVIDIA H100 80GB HBM3"), known_peak_flops("NVIDIA L40")
    (989000000000000.0, None)
    """
    tflops = bfloat16_tflops(name)
    return None if tflops is None else tflops * 1e12


@torch.no_grad()
def _measured(device: torch.device, dtype: torch.dtype) -> Peak:
    threads = torch.get_num_threads() if device.type == "cpu" else 0  # a GPU's work uses no host threads
    began, size = clock.monotonic(), _SMALLEST
    while True:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        _product(matrix)  # warm-up: the first product of a size initialises the library
        if _product(matrix).seconds >= _LONG_ENOUGH_S or size >= _LARGEST:
            break
        size *= 2
    rounds: list[Round] = []
    while len(rounds) < _ROUNDS or not is_calm(rounds, threads=threads):
        rounds.append(_product(matrix))
        if len(rounds) >= 3 and clock.monotonic() - began > _MAX_S:
            break
    best = min(each.seconds for each in rounds)
    return Peak(2 * size**3 / best, is_calm=is_calm(rounds, threads=threads))


def _product(matrix: torch.Tensor) -> Round:
    start, cpu = clock.monotonic(), clock.cpu_seconds()
    matrix @ matrix
    accelerator.wait(matrix.device)
    return Round(max(clock.monotonic() - start, 1e-9), clock.cpu_seconds() - cpu)

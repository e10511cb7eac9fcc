"""What a training step sees of the data sheets: the few constants of the model, each physical; no torch.

Those marked *fitted* come from `benchmarks/plan_accuracy.py`, which prints them anew and holds the model
against the published measurements it was not fitted on. The others are counted or stated by their source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


def _sustained() -> Mapping[str, float]:
    return {"cpu": 0.85, "volta": 0.75, "ampere": 0.80, "ada": 0.70, "hopper": 0.62, "blackwell": 0.62}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The free numbers of the model."""

    sustained: Mapping[str, float] = field(default_factory=_sustained)
    """Share of the peak that large matrix products reach, by architecture; *fitted* for ampere and hopper."""
    eager_passes: float = 2.5
    """How often eager kernels pass over memory where compiled ones pass once; *fitted*."""
    attention: float = 0.65
    """Speed of flash attention over that of large products; *fitted*."""
    contention: float = 0.1
    """Share of its speed that computing loses while a collective runs beside it; *fitted*."""
    stall_s: float = 0.085
    """Of the allocator, for each gather that finds memory over-committed; *fitted* to IBM's 20%."""
    straggling: float = 0.01
    """Usual spread of step times between devices, standard deviation / mean; *fitted*."""


FITTED: Final = Constants()

LINK_SHARE: Final = 0.8
"""Of NVLink or PCIe that collectives reach (nccl-tests: 230 to 240 of 300 GB/s on A100, 360 of 450 on
H100)."""
MEMORY_SHARE: Final = 0.85
"""Of the memory's bandwidth that kernels which only move numbers reach (STREAM on GPUs: 80 to 90%)."""
HOP_S: Final = 3e-6
"""Latency of a message between devices of a node (NCCL's own tuning table: 2 to 4 us)."""
BAND: Final = 0.15
"""Half-width of the band around a prediction: the 95th percentile of the errors on held-out rows."""

"""What a training step sees of the data sheets: the few constants of the model, each physical; no torch.

Those marked *fitted* come from `benchmarks/plan_accuracy.py`, which prints them anew and holds the model
against the published measurements it was not fitted on. The others are counted or stated by their source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


def _sustained() -> Mapping[str, float]:
    return {"cpu": 1.0, "volta": 0.85, "ampere": 0.982, "ada": 0.8, "hopper": 0.767, "blackwell": 0.767}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The free numbers of the model."""

    sustained: Mapping[str, float] = field(default_factory=_sustained)
    """Share of the peak that large matrix products reach, by architecture; *fitted* for ampere and hopper."""
    memory: float = 0.517
    """Share of the memory's bandwidth that kernels reach which only move numbers; *fitted*."""
    fill: float = 1170.0
    """What starting and ending a tile of a product costs, as so many more terms of its sums in bfloat16:
    products of long sums come nearer to the peak than those of short ones; *fitted*."""
    contention: float = 0.87
    """Share of its speed that computing loses while a collective runs beside it; *fitted*."""
    stall_s: float = 0.34
    """Of the allocator, for each gather that finds memory over-committed; *fitted* to IBM's 20%."""
    straggling: float = 0.01
    """Usual spread of step times between devices, standard deviation / mean."""
    jitter: float = 0.03
    """Spread between nodes that TCP adds; *fitted* to IBM's 90%."""


FITTED: Final = Constants()

LINK_SHARE: Final = 0.8
"""Of NVLink or PCIe that collectives reach (nccl-tests: 230 to 240 of 300 GB/s on A100, 360 of 450 on
H100)."""
ATTENTION: Final = {"cpu": 0.5, "volta": 0.3, "ampere": 0.6, "ada": 0.5, "hopper": 0.35, "blackwell": 0.3}
"""Share of the peak that flash attention reaches: 50 to 73% on A100 (Dao, arXiv:2307.08691), 35% on H100 by
the same code (Shah et al., arXiv:2407.08608). The other architectures are guesses."""
ROWWISE: Final = 0.7
"""Speed of 8-bit products with a scale a row over those with one a tensor: nanochat's log has 564 against 740
thousand tokens a second for whole steps."""
GAP_S: Final = 2e-6
"""Between kernels that follow one another on a GPU."""
GLOO_SHARE: Final = 0.87
"""Of what TCP gives that gloo uses, whose ranks send and receive in rounds; *fitted*, as a CPU's `copy_gb_s`,
to three steps of stock FSDP2 on emulated networks (`benchmarks/data/netlab_naive.json`)."""
MESSAGES_SHARE: Final = 0.96
"""Of what TCP gives that gloo's messages use, all receives announced first: 1.04 times the time of the wire,
by hand at 500 Mbit/s (docs/netlab.md)."""
HOP_S: Final = 2e-6
"""Latency of a message between devices of a node: a ring of 8 A100 takes some 25 us for a few bytes."""
HOST_COPY_GB_S: Final = 20.0
"""From a device to pinned memory, over PCIe 4 with 16 lanes."""

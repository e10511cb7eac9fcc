"""Which rank computes which sample of a step."""

import numpy as np

from penstock.core.errors import ConfigError
from penstock.data.types import Int64


def share(corpora: Int64, lanes: Int64, *, rank: int, world_size: int) -> Int64:
    """Return the positions in the step of the samples that a rank computes: [..., n / world_size].

    Samples are sorted by (corpus, lane) and split evenly, so the union over ranks is the step at any
    world size, and a rank keeps its lanes, and with them its open pools, from step to step.

    Args:
        corpora: [..., n] of each sample of a step, or of each of several steps.
        lanes: [..., n] as well.

    >>> share(np.array([0, 0, 0, 0]), np.array([1, 0, 1, 0]), rank=0, world_size=2).tolist()
    [1, 3]
    """
    local = corpora.shape[-1] // world_size
    order = np.lexsort((lanes, corpora))  # a stable sort, along the last axis
    return order[..., rank * local : (rank + 1) * local]


def check_divisible(global_batch_size: int, *, world_size: int) -> None:
    """Refuse a batch that cannot be split evenly.

    Raises:
        ConfigError: with the nearest batch sizes that can; or there are no ranks.
    """
    if world_size < 1:
        raise ConfigError("The number of ranks must be at least 1", got=world_size)
    if global_batch_size % world_size:
        lower = global_batch_size // world_size * world_size
        choices = " or ".join(str(size) for size in (lower, lower + world_size) if size)
        raise ConfigError(
            f"A global batch of {global_batch_size} sequences does not divide over {world_size} ranks",
            fix=f"Use a global batch of {choices}, or another number of ranks.",
        )

"""Place of a tuned model's frozen weights: sharded over the ranks, or whole on each; no torch."""

from penstock.parallel.layout import RankLayout
from penstock.train.recipe.config import TrainConfig

SHARE_OF_MEMORY = 0.5
"""Share of a device's memory that whole frozen weights may take."""


def is_whole(config: TrainConfig, layout: RankLayout, *, memory_bytes: int) -> bool:
    """Return True if every rank is to hold all frozen weights of its stages and slices.

    Args:
        memory_bytes: memory of a rank's device.
    """
    tune = config.tune
    if tune is None or tune.adapter is None or config.parallel.offload:
        return False
    if tune.base != "compute" or tune.base_sharding == "whole":
        return True
    if tune.base_sharding == "sharded":
        return False
    number_bytes = 2 if config.compute == "bfloat16" else 4
    frozen_bytes = number_bytes * config.model.num_parameters // (layout.tensor * layout.pipeline)
    return frozen_bytes <= SHARE_OF_MEMORY * memory_bytes

"""Place of a tuned model's frozen weights: sharded over the ranks, or whole on each; no torch."""

from penstock.parallel.layout import RankLayout
from penstock.train.planning.memory import memory_plan
from penstock.train.recipe.config import TrainConfig

SHARE_OF_MEMORY = 0.8
"""Share of a device's memory that a step with whole frozen weights may take."""


def is_whole(config: TrainConfig, layout: RankLayout, *, memory_bytes: int) -> bool:
    """Return True if every rank is to hold all frozen weights of its stages and slices.

    Args:
        memory_bytes: memory of a rank's device.

    Raises:
        ConfigError: recompute.budget is too small.
    """
    tune = config.tune
    if tune is None or tune.adapter is None or config.parallel.offload:
        return False
    if tune.base != "compute" or tune.base_sharding == "whole":
        return True
    if tune.base_sharding == "sharded":
        return False
    return memory_plan(config, layout, whole_base=True).total <= SHARE_OF_MEMORY * memory_bytes

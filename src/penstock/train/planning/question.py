"""Planner questions from recipes, and recipes from the planner's answers; imports no torch."""

import math

from penstock.core.config import Raw
from penstock.parallel.layout import AXES, REST
from penstock.plan.candidates import Question
from penstock.plan.recipe_sections import decided, sections_of, with_plan
from penstock.plan.search import Option
from penstock.train.planning.memory import kept_of, step_of
from penstock.train.recipe.config import TrainConfig, on_machines
from penstock.train.recipe.planned_changes import plan


def question_of(config: TrainConfig, raw: Raw, *, may_compress: bool = False) -> Question:
    """Return the planning question of a recipe.

    Args:
        raw: values of its file: these are fixed.
        may_compress: allow 8-bit gathers and reductions.
    """
    size = math.gcd(
        *(planned.entry.global_batch_size or 0 for planned in plan(config.data)),
        config.data.global_batch_size,
    )
    knobs = decided(raw)
    if config.optim.rule == "adamw_8bit":
        knobs.setdefault("tensor", 1)  # tensor-parallel slices would cut blocks of moments
    if config.parallel.offload:
        knobs.setdefault("gather", "compute")  # the only one that supports offloading
    if config.ethernet.keep_mib or config.ethernet.schedule != "depth_first":
        knobs.setdefault("pipeline", 1)  # pipelines keep all blocks and order micro-batches themselves
    if config.parallel.replicate == REST:  # the number of replicas varies, so their size is fixed
        for axis in ("tensor", "context", "pipeline"):
            knobs.setdefault(axis, getattr(config.parallel, axis))
    if not isinstance(config.parallel.reshard_after_forward, bool):  # needs parameters shared by all ranks
        knobs |= {"tensor": 1, "pipeline": 1, "replicate": 1}
    return Question(
        step=step_of(config),
        global_batch_size=size,
        kept=kept_of(config),
        may_compress=may_compress,
        decided=knobs,
    )


def in_numbers(raw: Raw, config: TrainConfig, *, world_size: int, ranks_per_machine: int) -> Raw:
    """Return a recipe's values with `parallel.hierarchy` resolved to numbers for the machines.

    Raises:
        ConfigError: the ranks of a machine cannot be divided that way.
    """
    if config.parallel.hierarchy == "flat":
        return raw
    numbers = on_machines(config, world_size=world_size, ranks_per_machine=ranks_per_machine).parallel
    said = {name: value for name, value in raw["parallel"].items() if name != "hierarchy"}
    for name in (*AXES, "reshard_after_forward"):
        said[name] = getattr(numbers, name)
    return {**raw, "parallel": said}


def recipe_of(raw: Raw, option: Option) -> Raw:
    """Return a recipe's values with those of a plan in the open keys, and without `plan`."""
    joined = with_plan(raw, sections_of(option.job))
    return {name: value for name, value in joined.items() if name != "plan"}


def recipe_for_preset(preset: str, *, tokens: float, rows: int, length: int) -> Raw:
    """Return the values of a recipe that trains a preset on `tokens` tokens."""
    return {
        "compute": "bfloat16",
        "run": {"dir": f"runs/{preset}", "steps": max(1, round(tokens / (rows * length)))},
        "model": {"preset": preset},
        "data": {
            "sequence_length": length,
            "global_batch_size": rows,
            "corpora": {"docs": {"path": "corpus"}},
        },
        "compile": {"enabled": True},
    }

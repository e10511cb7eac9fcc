"""What a recipe asks the planner, and the planner's answer as a recipe; imports no torch."""

import math

from penstock.core.config import Raw
from penstock.parallel.layout import AXES, REST
from penstock.plan.candidates import Question
from penstock.plan.search import Option
from penstock.plan.sections import decided, sections_of, with_plan
from penstock.train.changes import plan
from penstock.train.config import TrainConfig, on_machines
from penstock.train.memory_plan import kept_of


def question_of(config: TrainConfig, raw: Raw, *, may_compress: bool = False) -> Question:
    """Return what is to be planned for a recipe.

    Args:
        raw: the values of its file: what they say is decided.
        may_compress: whether weights and gradients may travel in 8 bits.
    """
    size = math.gcd(
        *(planned.entry.global_batch_size or 0 for planned in plan(config.data)),
        config.data.global_batch_size,
    )
    knobs = decided(raw)
    if config.optim.rule == "adamw_8bit":
        knobs.setdefault("tensor", 1)  # slices would cut blocks of moments
    if config.parallel.offload:
        knobs.setdefault("gather", "compute")  # nothing else goes with it
    if config.ethernet.keep_mib:
        knobs.setdefault("pipeline", 1)  # whose ranks keep all blocks anyway
    if config.parallel.replicate == REST:  # as many copies as there are ranks for: their size is said
        for axis in ("tensor", "context", "pipeline"):
            knobs.setdefault(axis, getattr(config.parallel, axis))
    if not isinstance(config.parallel.reshard_after_forward, bool):  # only where all ranks share parameters
        knobs |= {"tensor": 1, "pipeline": 1, "replicate": 1}
    return Question(
        model=config.model,
        sequence_length=config.data.longest,
        global_batch_size=size,
        kept=kept_of(config),
        compute=config.compute,
        linear=config.precision.linear,
        kernels="compiled" if config.compile.enabled else "eager",
        overlapped=config.ethernet.overlap,
        context_rule=config.parallel.context_rule,
        checkpoint_every=config.checkpoint.every,
        outer_every=config.outer.every,
        outer_bits=config.outer.bits,
        may_compress=may_compress,
        decided=knobs,
    )


def in_numbers(raw: Raw, config: TrainConfig, *, world_size: int, ranks_per_machine: int) -> Raw:
    """Return a recipe's values with `parallel.hierarchy` in the numbers of the machines, which are decided.

    Raises:
        ConfigError: a machine's ranks cannot be shared that way.
    """
    if config.parallel.hierarchy == "flat":
        return raw
    numbers = on_machines(config, world_size=world_size, ranks_per_machine=ranks_per_machine).parallel
    said = {name: value for name, value in raw["parallel"].items() if name != "hierarchy"}
    for name in (*AXES, "reshard_after_forward"):
        said[name] = getattr(numbers, name)
    return {**raw, "parallel": said}


def recipe_of(raw: Raw, option: Option) -> Raw:
    """Return a recipe's values with those of a plan where it left them open; they are not planned again."""
    joined = with_plan(raw, sections_of(option.job))
    return {name: value for name, value in joined.items() if name != "plan"}


def recipe_for_preset(preset: str, *, tokens: float, rows: int, length: int) -> Raw:
    """Return the beginning of a recipe that trains a published shape on so many tokens."""
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

"""Memory of one rank, predicted from a recipe; no torch."""

from dataclasses import replace

from penstock.models.decoder.layer_kind import LayerKind
from penstock.parallel.activation_checkpointing_plan import Mode, plan
from penstock.parallel.layout import RankLayout
from penstock.plan.activations import block_bytes
from penstock.plan.job import TrainingStep
from penstock.plan.memory import BytesPerParameter, Memory, peak
from penstock.train.recipe.config import (
    TrainConfig,
    Weights,
    gradient_bytes_per_parameter,
    weight_bytes_per_parameter,
)
from penstock.train.recipe.optim_config import OptimConfig, optimizer_bytes_per_parameter
from penstock.train.recipe.outer_config import outer_bytes_per_parameter
from penstock.train.recipe.planned_changes import plan as planned_changes

_SHARE_OF_MEMORY = 0.8
"""Share of a device's memory that a step with whole frozen weights may take."""


def memory_plan(
    config: TrainConfig, layout: RankLayout, *, on_cpu: bool | None = None, whole_base: bool | None = None
) -> Memory:
    """Predict the memory of the rank that needs most, at the recipe's largest micro-batch.

    Args:
        on_cpu: True if ranks are on CPUs; None: assumed if the recipe computes in float32.
        whole_base: True if each rank holds all frozen weights; None: as tune.base_sharding says.

    Raises:
        ConfigError: recompute.budget is too small.
    """
    job = job_of(config, layout, whole_base=whole_base)
    return peak(job if on_cpu is None else replace(job, on_cpu=on_cpu), kept_of(config))


def job_of(config: TrainConfig, layout: RankLayout, *, whole_base: bool | None = None) -> TrainingStep:
    """Return the planner's description of a step with the recipe's largest micro-batches.

    Args:
        whole_base: as in `memory_plan`; auto counts as whole.

    Raises:
        ConfigError: recompute.budget is too small.
    """
    parallel, ethernet, step = config.parallel, config.ethernet, step_of(config)
    rows, length, micro_batches = largest_micro_batch(config, layout)
    return replace(
        step,
        layout=layout,
        sequence_length=length,
        micro_batch_size=rows,
        num_micro_batches=micro_batches,
        modes=tuple(recompute_modes(config, layout)),
        stages_per_rank=parallel.stages_per_rank,
        reshard_after_forward=parallel.reshard_after_forward,
        window_mib=ethernet.window_mib,
        keep_mib=ethernet.keep_mib,
        gather=ethernet.gather,
        reduce=ethernet.reduce,
        feedback=ethernet.feedback,
        schedule=ethernet.schedule,
        operations=ethernet.operations,
        turning=step.overlapped,
        state_bytes=kept_of(config).state,
        on_cpu=config.compute == "float32",  # an assumption: GPUs train in bfloat16
        whole_base=step.whole_base if whole_base is None else whole_base,
        outer_every=step.outer_every if layout.replicate > 1 else 0,
    )


def step_of(config: TrainConfig) -> TrainingStep:
    """Return the planner's description of a recipe's step, for one row on one rank.

    It has the settings that no plan changes. `job_of` adds those of the recipe's layout, and the planner's
    `jobs` those of each candidate.
    """
    return TrainingStep(
        model=config.model,
        layout=RankLayout(),
        sequence_length=config.data.longest,
        context_rule=config.parallel.context_rule,
        compute=config.compute,
        linear=config.precision.linear,
        kernels="compiled" if config.compile.enabled else "eager",
        overlapped=config.ethernet.overlap,
        adapter=None if config.adapter is None else config.adapter.alike(),
        whole_base=is_whole(config),
        outer_every=config.outer.every,
        outer_bits=config.outer.bits,
        checkpoint_every=config.checkpoint.every,
    )


def is_whole(config: TrainConfig) -> bool:
    """Return True if a recipe's frozen weights are whole on each rank; auto counts as such."""
    if config.tune is None or config.adapter is None or config.parallel.offload:
        return False
    return config.tune.base_sharding != "sharded"


def keeps_base_whole(config: TrainConfig, layout: RankLayout, *, memory_bytes: int) -> bool:
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
    return memory_plan(config, layout, whole_base=True).total <= _SHARE_OF_MEMORY * memory_bytes


def kept_of(config: TrainConfig) -> BytesPerParameter:
    """Return the persistent bytes per parameter on a rank, the outer optimizer included."""
    kept, outer = _kept(config.optim, config.precision.weights), outer_bytes_per_parameter(config.outer)
    return replace(kept, optimizer=kept.optimizer + outer, optimizer_outside=kept.optimizer_outside + outer)


def _kept(optim: OptimConfig, weights: Weights) -> BytesPerParameter:
    """Return the persistent bytes per parameter on a rank, without the outer optimizer."""
    update = {"float32": 0.0, "bfloat16_master": 4.0, "bfloat16_stochastic": 8.0}[weights]
    return BytesPerParameter(
        weights=weight_bytes_per_parameter(weights),
        gradients=gradient_bytes_per_parameter(weights),
        optimizer=optimizer_bytes_per_parameter(optim),
        optimizer_outside=optimizer_bytes_per_parameter(optim, in_blocks=False),
        update=update + (8.0 if optim.rule == "muon" else 0.0),
    )


def recompute_modes(config: TrainConfig, layout: RankLayout) -> list[Mode]:
    """Return the activation checkpointing mode of each block.

    Raises:
        ConfigError: recompute.budget is too small.
    """
    _, _, micro_batches = largest_micro_batch(config, layout)
    together = micro_batches if is_together(config) else 1

    def kept(kind: LayerKind) -> dict[Mode, int]:
        found = block_bytes(
            config.model,
            kind,
            tokens=micro_batch_tokens(config, layout),
            compute_bytes=2 if config.compute == "bfloat16" else 4,
            tensor=layout.tensor,
            context=layout.context,
            rule=config.parallel.context_rule,
            row=config.data.longest,
        )
        return {mode: together * size for mode, size in found.items()}

    return plan(config.recompute, kept=[kept(kind) for kind in config.model.layers])


def micro_batch_tokens(config: TrainConfig, layout: RankLayout) -> int:
    """Return the tokens of a rank's largest micro-batch, over all planned changes."""
    rows, length, _ = largest_micro_batch(config, layout)
    return rows * length // layout.context


def largest_micro_batch(config: TrainConfig, layout: RankLayout) -> tuple[int, int, int]:
    """Return rows, length and number of micro-batches for the largest one over all planned changes.

    With the breadth-first schedule all micro-batches of a step are in memory at once, so the largest step
    counts.
    """
    data = config.data
    size, micro, length = data.global_batch_size, data.micro_batch_size, data.sequence_length
    steps = [(size, micro, length)]
    for change in planned_changes(data):
        entry = change.entry
        size, micro = entry.global_batch_size or size, entry.micro_batch_size or micro
        length = entry.sequence_length or length
        steps.append((size, micro, length))
    found = []
    for size, micro, length in steps:
        local = size // layout.num_data
        rows = micro or local
        found.append((rows, length, max(1, local // max(1, rows))))
    return max(found, key=lambda one: one[0] * one[1] * (one[2] if is_together(config) else 1))


def is_together(config: TrainConfig) -> bool:
    """True if all micro-batches of a step are in the blocks at once (breadth-first schedule)."""
    return config.ethernet.schedule == "breadth_first"

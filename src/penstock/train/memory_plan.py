"""What takes memory on one rank of a run, before it runs: a recipe as the planner sees it; no torch."""

from dataclasses import replace

from penstock.parallel.layout import Layout
from penstock.parallel.recompute_plan import Mode, plan
from penstock.plan.activations import block_bytes
from penstock.plan.job import Job
from penstock.plan.memory import Memory, peak
from penstock.plan.rank_bytes import Kept
from penstock.train.changes import plan as planned_changes
from penstock.train.config import TrainConfig
from penstock.train.optim.config import OptimConfig, optimizer_bytes_per_parameter
from penstock.train.outer_config import outer_bytes_per_parameter
from penstock.train.precision import Weights, gradient_bytes_per_parameter, weight_bytes_per_parameter


def memory_plan(config: TrainConfig, layout: Layout, *, on_cpu: bool | None = None) -> Memory:
    """Work out the memory of the rank that needs most, at the largest micro-batch of the recipe.

    Args:
        on_cpu: whether ranks compute on CPUs; None: a guess, where the recipe computes in float32.

    Raises:
        ConfigError: the recipe's recompute.budget is too small.
    """
    job = job_of(config, layout)
    return peak(job if on_cpu is None else replace(job, on_cpu=on_cpu), kept_of(config))


def job_of(config: TrainConfig, layout: Layout) -> Job:
    """Return a step of a recipe's largest micro-batches as the planner sees it.

    Raises:
        ConfigError: the recipe's recompute.budget is too small.
    """
    parallel, ethernet = config.parallel, config.ethernet
    rows, length, micro_batches = largest_micro_batch(config, layout)
    kept = kept_of(config)
    return Job(
        model=config.model,
        layout=layout,
        sequence_length=length,
        micro_batch_size=rows,
        num_micro_batches=micro_batches,
        modes=tuple(recompute_modes(config, layout)),
        context_rule=parallel.context_rule,
        stages_per_rank=parallel.stages_per_rank,
        reshard_after_forward=parallel.reshard_after_forward,
        window_mib=ethernet.window_mib,
        keep_mib=ethernet.keep_mib,
        compute=config.compute,
        linear=config.precision.linear,
        gather=ethernet.gather,
        reduce=ethernet.reduce,
        feedback=ethernet.feedback,
        operations=ethernet.operations,
        kernels="compiled" if config.compile.enabled else "eager",
        overlapped=ethernet.overlap,
        on_cpu=config.compute == "float32",  # a guess: GPUs train in bfloat16
        turning=ethernet.overlap,
        state_bytes=kept.weights + kept.gradients + kept.optimizer,
        outer_every=config.outer.every if layout.replicate > 1 else 0,
        outer_bits=config.outer.bits,
        checkpoint_every=config.checkpoint.every,
    )


def kept_of(config: TrainConfig) -> Kept:
    """Return the bytes that a rank keeps per parameter, those of the outer optimizer counted."""
    kept, outer = _kept(config.optim, config.precision.weights), outer_bytes_per_parameter(config.outer)
    return replace(kept, optimizer=kept.optimizer + outer, optimizer_outside=kept.optimizer_outside + outer)


def _kept(optim: OptimConfig, weights: Weights) -> Kept:
    """Return the bytes that a rank keeps per parameter."""
    update = {"float32": 0.0, "bfloat16_master": 4.0, "bfloat16_stochastic": 8.0}[weights]
    return Kept(
        weights=weight_bytes_per_parameter(weights),
        gradients=gradient_bytes_per_parameter(weights),
        optimizer=optimizer_bytes_per_parameter(optim),
        optimizer_outside=optimizer_bytes_per_parameter(optim, in_blocks=False),
        update=update + (8.0 if optim.rule == "muon" else 0.0),
    )


def recompute_modes(config: TrainConfig, layout: Layout) -> list[Mode]:
    """Return what each block does with its activations.

    Raises:
        ConfigError: the recipe's recompute.budget is too small.
    """
    kept = block_bytes(
        config.model,
        tokens=micro_batch_tokens(config, layout),
        compute_bytes=2 if config.compute == "bfloat16" else 4,
        tensor=layout.tensor,
        context=layout.context,
        rule=config.parallel.context_rule,
        row=config.data.longest,
    )
    return plan(config.recompute, num_blocks=config.model.num_hidden_layers, kept=kept)


def micro_batch_tokens(config: TrainConfig, layout: Layout) -> int:
    """Return the tokens of a rank's largest micro-batch, over all planned changes."""
    rows, length, _ = largest_micro_batch(config, layout)
    return rows * length // layout.context


def largest_micro_batch(config: TrainConfig, layout: Layout) -> tuple[int, int, int]:
    """Return rows and length of the micro-batch with most tokens over all planned changes, and how many."""
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
    return max(found, key=lambda one: one[0] * one[1])

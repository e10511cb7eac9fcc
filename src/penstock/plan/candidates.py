"""Candidate plans: all sensible layouts of a job on a cluster. Pure functions.

Settings decided by the user are not varied. Layouts that never pay are not tried: tensor parallelism across
machines, context parallelism for rows that every rank can hold, more stages than machines could need.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from penstock.core.errors import ConfigError
from penstock.parallel.feasibility import check_fit
from penstock.parallel.layout import REST, ParallelConfig, RankLayout
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.memory import ADAMW, BytesPerParameter

_LONG_ROWS = 16_384
"""Minimum tokens of a row for context parallelism."""
_LARGEST_MICRO_BATCH = 65_536
"""Maximum tokens of a rank's forward pass; beyond it, products do not get faster."""
_MAX_STAGES = 16
_PASSED_ON = ("window_mib", "schedule", "operations", "gather", "reduce", "feedback", "reshard_after_forward")
"""Settings that a job takes directly from the decided ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Job to plan: a step, its batch, and the settings that are decided already."""

    step: TrainingStep
    """Step of one row on one rank. The planner sets its layout, micro-batches, stages, `modes`, `keep_mib`,
    `turning`, `state_bytes`, `on_cpu` and `data_tokens_per_s`, and reads all other fields. It never changes
    `outer_every` of a plan with several replicas."""
    global_batch_size: int
    """Rows of a step."""
    kept: BytesPerParameter = ADAMW
    """Weights, gradients and optimizer state on a rank; `jobs` sets `state_bytes` from it."""
    may_compress: bool = False
    """True if weights and gradients may be sent in 8 bits, which changes the result."""
    decided: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are fixed: `shard`, `replicate`, `tensor`, `context`, `pipeline`,
    `stages_per_rank`, `micro_batch_size`, `modes`, `keep_mib`, `window_mib`, `schedule`, `operations`,
    `gather`, `reduce`, `feedback`, `reshard_after_forward`."""


def layouts(question: Question, cluster: Cluster) -> Iterator[tuple[RankLayout, int]]:
    """Yield layouts that use the whole cluster and fit the model, with stages per rank."""
    decided, devices = question.decided, cluster.num_devices
    tensors = _choices(decided, "tensor", divisors(cluster.devices_per_node))
    contexts = [1] if question.step.sequence_length < _LONG_ROWS else divisors(cluster.devices_per_node)
    contexts = _choices(decided, "context", contexts)
    blocks = min(_MAX_STAGES, question.step.model.num_hidden_layers)
    pipelines = _choices(decided, "pipeline", [p for p in divisors(devices) if p <= blocks])
    stages = _choices(decided, "stages_per_rank", [1, 2])
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        rest, left_over = divmod(devices, tensor * context * pipeline)
        if left_over or not rest:
            continue
        for shard in _shards(question, cluster, rest=rest, sharing=tensor * context):
            axes = {"tensor": tensor, "context": context, "pipeline": pipeline, "shard": shard}
            layout = RankLayout(replicate=rest // shard, **axes)
            for per_rank in stages if pipeline > 1 else [1]:
                if question.global_batch_size % layout.num_data == 0 and _fits(question, layout, per_rank):
                    yield layout, per_rank


def jobs(
    question: Question, layout: RankLayout, stages_per_rank: int, cluster: Cluster
) -> Iterator[TrainingStep]:
    """Yield the jobs of a layout by micro-batch size, without kept parameters and without recomputation."""
    local = question.global_batch_size // layout.num_data
    decided, step = question.decided, question.step
    for rows in _choices(decided, "micro_batch_size", divisors(local)):
        if local % rows or not _flows(local // rows, layout.pipeline, stages_per_rank):
            continue
        tokens = rows * step.sequence_length // layout.context
        if rows > 1 and tokens > _LARGEST_MICRO_BATCH and "micro_batch_size" not in decided:
            continue
        yield replace(
            step,
            layout=layout,
            micro_batch_size=rows,
            num_micro_batches=local // rows,
            stages_per_rank=stages_per_rank,
            turning=step.overlapped,
            state_bytes=question.kept.state,
            on_cpu=cluster.device.architecture == "cpu",
            data_tokens_per_s=cluster.loader_tokens_s or math.inf,
            outer_every=step.outer_every if layout.replicate > 1 else 0,
            **{name: decided[name] for name in _PASSED_ON if name in decided},
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]


def _choices(decided: Mapping[str, Any], name: str, choices: list[int]) -> list[int]:
    found = decided.get(name, REST)
    return choices if found == REST else [found]


def _shards(question: Question, cluster: Cluster, *, rest: int, sharing: int) -> Iterator[int]:
    """Yield possible shard degrees: over all ranks, those of a machine, or none."""
    decided = question.decided
    if decided.get("shard", REST) != REST:
        sizes = {decided["shard"]}
    elif decided.get("replicate", REST) != REST:
        sizes = {rest // decided["replicate"]}
    else:
        sizes = {rest, max(1, cluster.devices_per_node // sharing), 1}
    for size in sorted(sizes):
        if size and rest % size == 0 and decided.get("replicate", REST) in (REST, rest // size):
            yield size


def _fits(question: Question, layout: RankLayout, stages_per_rank: int) -> bool:
    """Return True if the model can be divided by a layout."""
    config = ParallelConfig(
        tensor=layout.tensor,
        context=layout.context,
        context_rule=question.step.context_rule,
        pipeline=layout.pipeline,
        stages_per_rank=stages_per_rank,
    )
    try:
        check_fit(config, question.step.model, lengths=[question.step.sequence_length])
    except ConfigError:
        return False
    return True


def _flows(micro_batches: int, ranks: int, stages_per_rank: int) -> bool:
    """Return True if a pipeline has enough micro-batches."""
    return micro_batches >= ranks and (stages_per_rank == 1 or micro_batches % ranks == 0)

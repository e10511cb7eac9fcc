"""Cost of a block on a rank: its compute time, and the collectives over its parameters. Pure functions."""

import math
from dataclasses import replace

from penstock.models.decoder.layer_kind import LayerKind
from penstock.parallel.layout import blocks_of
from penstock.plan.comm import FREE, Cost, GroupTopology, all_reduce, group, groups_of, ring
from penstock.plan.compute import (
    RESERVE_GIB,
    Constants,
    Seconds,
    again_seconds,
    block_seconds,
    coding_seconds,
    head_seconds,
)
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.timeline import BlockCost, Transfers

_MIB = 2**20
_GRADIENT_BYTES = 4
_COLLECTIVES = 4
"""Collectives of tensor and sequence parallelism in a block of two parts, forward: each gathers and scatters
tokens."""


def units_of(
    job: TrainingStep, cluster: Cluster, constants: Constants, *, memory_bytes: float = 0.0
) -> list[BlockCost]:
    """Return the units of a rank in forward order: its blocks, and the output matrix with the embedding."""
    groups = groups_of(job.layout, cluster)
    if cluster.device.architecture == "cpu":  # a gloo operation uses one NIC
        pieces = (job.operations or cluster.nics) if job.overlapped else 1
        cluster = replace(cluster, nics=min(cluster.nics, pieces))
    units = [*_blocks(job, cluster, constants, groups), _ends(job, cluster, constants, groups)]
    if stall := _stall(job, cluster, groups, constants, memory_bytes):
        units = [replace(unit, stall=stall) for unit in units]
    return _contended(units, job, constants)


def _stall(
    job: TrainingStep,
    cluster: Cluster,
    groups: dict[str, GroupTopology],
    constants: Constants,
    memory_bytes: float,
) -> float:
    """Return the allocator's delay before each gather if there is no free memory of that size."""
    if cluster.device.architecture == "cpu":
        return 0.0
    if math.isinf(job.window_mib) and groups["shard"].nodes > 1:
        return constants.stall_s
    is_tight = memory_bytes > (cluster.device.memory_gib - RESERVE_GIB) * 2**30
    return constants.retry_s if is_tight else 0.0


def window_of(job: TrainingStep, cluster: Cluster, *, num_units: int) -> int:
    """Return the number of blocks that may be gathered at a time.

    Without a limit, gathers over a network outrun computing until the allocator finds no memory, waits for
    all of them, and retries: effectively one at a time, each after a stall.
    """
    if math.isinf(job.window_mib):
        stalls = groups_of(job.layout, cluster)["shard"].nodes > 1
        return 1 if stalls else 2 * num_units
    block = job.largest_block * job.compute_bytes / job.layout.tensor
    return max(1, int(job.window_mib * _MIB // block)) if job.window_mib else 2


def kept_blocks(job: TrainingStep, num_blocks: int) -> int:
    """Return the number of blocks whose parameters stay gathered, and gradients unreduced, through a step."""
    if job.layout.pipeline > 1 or math.isinf(job.keep_mib):
        return num_blocks
    block = job.largest_block / job.layout.tensor * (job.compute_bytes + _GRADIENT_BYTES)
    return min(num_blocks, int(job.keep_mib * _MIB // block))


def _blocks(
    job: TrainingStep, cluster: Cluster, constants: Constants, groups: dict[str, GroupTopology]
) -> list[BlockCost]:
    mine = _blocks_of_last(job)
    kept, others = kept_blocks(job, len(mine)), job.batches_per_pass - 1
    layers = job.model.layers
    of_kind = {kind: _of_kind(job, cluster, constants, groups, kind) for kind in set(layers)}
    found = []
    for place, index in enumerate(mine):
        plain, seconds, inline, back, transfers = of_kind[layers[index]]
        again = job.block_modes[index] == "full"
        found.append(
            BlockCost(
                name=f"block {index}",
                forward=seconds.forward + others * plain.forward,
                backward=seconds.backward
                + others * plain.backward
                + (1 + others) * again_seconds(plain, job.block_modes[index]),
                inline=(1 + others) * inline.seconds,
                inline_back=(1 + others) * (back.seconds + again * inline.seconds),
                inline_link=inline.link,
                inline_node_bytes=(1 + others) * inline.node_bytes,
                inline_node_bytes_back=(1 + others) * (back.node_bytes + again * inline.node_bytes),
                transfers=transfers,
                kept=place < kept,
                agrees_always=not job.overlapped,
            )
        )
    return found


def _of_kind(
    job: TrainingStep,
    cluster: Cluster,
    constants: Constants,
    groups: dict[str, GroupTopology],
    kind: LayerKind,
) -> tuple[Seconds, Seconds, Cost, Cost, Transfers]:
    """Return the time of a block, the same with codecs, its collectives forward and backward, and those over
    its parameters."""
    plain, parameters = block_seconds(job, cluster.device, constants, kind), job.in_blocks([kind])
    seconds = _coded(plain, parameters, job, cluster, constants)
    transfers = _transfers(job, cluster, groups, parameters, learned=job.learned_of_block(kind))
    return plain, seconds, *_inline(job, cluster, groups, seconds, constants, kind), transfers


def _blocks_of_last(job: TrainingStep) -> list[int]:
    """Return the blocks of a pipeline's last rank, the slowest: it has the output matrix as well."""
    ranks, per_rank = job.layout.pipeline, job.stages_per_rank
    stages, num_blocks = ranks * per_rank, job.model.num_hidden_layers
    mine = range(ranks - 1, stages, ranks)
    return [index for stage in mine for index in blocks_of(stage, stages=stages, num_blocks=num_blocks)]


def _ends(
    job: TrainingStep, cluster: Cluster, constants: Constants, groups: dict[str, GroupTopology]
) -> BlockCost:
    """Return the unit outside of the blocks (in a pipeline the output matrix alone); it stays gathered."""
    seconds = head_seconds(job, cluster.device, constants)
    is_pipeline = job.layout.pipeline > 1
    share = job.layout.pipeline if job.stages_balanced else 1
    matrix = job.model.vocab_size * job.model.hidden_size if is_pipeline else job.outside
    return BlockCost(
        name="head",
        forward=job.batches_per_pass * seconds.forward / share,
        backward=job.batches_per_pass * seconds.backward / share,
        transfers=_transfers(job, cluster, groups, matrix, learned=job.learned_outside())._replace(
            again=FREE
        ),
        kept=is_pipeline or math.isinf(job.keep_mib),
        agrees_always=not job.overlapped,
    )


def _transfers(
    job: TrainingStep,
    cluster: Cluster,
    groups: dict[str, GroupTopology],
    parameters: float,
    *,
    learned: float,
) -> Transfers:
    """Return the collectives over a unit's parameters.

    Args:
        learned: numbers that this rank learns of them.
    """
    if job.whole_base:
        return Transfers(across=_over_copies(job, cluster, learned))
    mine, over = parameters / job.layout.tensor, groups["shard"]
    if job.adapter is not None:
        mine += learned
    gather = ring(mine * job.gather_bytes, over, cluster, by_messages=job.overlapped)
    again = gather if job.reshard_after_forward else FREE
    if not isinstance(job.reshard_after_forward, bool):
        here = min(job.reshard_after_forward, cluster.devices_per_node)
        nodes = job.reshard_after_forward // here
        again = ring(mine * job.gather_bytes, GroupTopology(job.reshard_after_forward, nodes, 1), cluster)
    across = FREE
    if not job.outer_every:
        across = all_reduce(learned * job.reduce_bytes / job.shard_ranks, groups["replicate"], cluster)
    rounds = 1 if job.overlapped or cluster.device.architecture != "cpu" else 2  # gloo's own reduce-scatter
    reduction = ring(learned * job.reduce_bytes, over, cluster, rounds=rounds, by_messages=job.overlapped)
    return Transfers(gather, again, reduction, across)


def _over_copies(job: TrainingStep, cluster: Cluster, learned: float) -> Cost:
    """Return the cost of averaging what is learned over the ranks that hold all of it."""
    layout = job.layout
    copies = layout.shard * layout.context * (1 if job.outer_every else layout.replicate)
    over = group(copies, stride=layout.tensor, devices_per_node=cluster.devices_per_node)
    return all_reduce(learned * job.reduce_bytes, over, cluster)


def _inline(
    job: TrainingStep,
    cluster: Cluster,
    groups: dict[str, GroupTopology],
    seconds: Seconds,
    constants: Constants,
    kind: LayerKind,
) -> tuple[Cost, Cost]:
    """Return the collectives in one block's forward, and in its backward, that computing waits for."""
    model, layout = job.model, job.layout
    scatter = 2 if cluster.device.architecture == "cpu" else 1  # gloo's is an all-reduce
    width = model.num_attention_heads * model.size_of_head
    keys = model.key_value_heads * model.size_of_head
    collectives = _COLLECTIVES * len(kind.parts) / 2
    tokens = collectives * (1 + scatter) / 2 * job.rank_tokens * model.hidden_size  # half are scatters
    tensor = ring(tokens * job.compute_bytes, groups["tensor"], cluster)
    sums = ring(job.summed_of_block(kind) * job.compute_bytes, groups["tensor"], cluster, rounds=2)
    local_tokens, row = job.rank_tokens / layout.tensor, job.rows_tokens / layout.tensor
    exchanged = job.context_rule == "ulysses"
    sent = (local_tokens * 2 * (width + keys) if exchanged else row * 2 * keys) * job.compute_bytes
    sent *= kind.attention is not None
    there = ring(sent, groups["context"], cluster)
    back = there if exchanged else ring(scatter * sent, groups["context"], cluster)
    forward = _exposed(tensor, job, seconds.forward, constants)
    backward = _exposed(tensor, job, seconds.backward, constants)
    return _together(forward, there), _together(backward, back, sums)


def _together(*costs: Cost) -> Cost:
    """Return the cost of collectives one after the other, over the link of the slowest."""
    seconds, sent = sum(cost.seconds for cost in costs), sum(cost.node_bytes for cost in costs)
    return Cost(seconds, max(costs).link, sent, 0.0)


def _exposed(tensor: Cost, job: TrainingStep, products_s: float, constants: Constants) -> Cost:
    """Return the exposed part of tensor collectives; when pipelined, a share hides behind products."""
    if not job.tensor_overlapped:
        return tensor
    hidden = min(tensor.seconds * constants.hidden, products_s)
    return tensor._replace(seconds=tensor.seconds - hidden)


def _coded(
    seconds: Seconds, parameters: int, job: TrainingStep, cluster: Cluster, constants: Constants
) -> Seconds:
    """Return a block's compute seconds with those of the 8-bit codecs of its collectives."""
    once = coding_seconds(parameters / job.layout.tensor, cluster.device, constants)
    gathers, reduces = (codec in ("int8", "float8") for codec in (job.gather, job.reduce))
    gathers = gathers and job.linear == "compute"  # 8-bit products cast to 8 bits anyway
    return seconds._replace(
        forward=seconds.forward + gathers * once,
        backward=seconds.backward + (gathers * bool(job.reshard_after_forward) + reduces) * once,
    )


def _contended(units: list[BlockCost], job: TrainingStep, constants: Constants) -> list[BlockCost]:
    """Return units slowed by concurrent collectives, which use the device's memory bandwidth too."""
    computing = sum(unit.forward + unit.backward for unit in units)
    beside = sum(
        cost.inside_s / (job.num_passes if unit.kept else 1) for unit in units for cost in unit.transfers
    )
    if not job.overlapped or not beside:
        return units
    slower = 1 + constants.contention * min(1.0, beside / computing)
    return [replace(unit, forward=unit.forward * slower, backward=unit.backward * slower) for unit in units]

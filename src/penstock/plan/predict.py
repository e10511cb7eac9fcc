"""Predict a training step: its seconds and where they go, from a job and a cluster; no torch.

The arithmetic is in `compute.py` and `comm.py`, the waiting in `timeline.py`; here they are put together.
"""

import math
from dataclasses import dataclass, replace

from penstock.core.errors import ConfigError
from penstock.plan.comm import FREE, Cost, Group, Link, all_reduce, groups_of, ring, send
from penstock.plan.compute import Seconds, again_seconds, block_seconds, head_seconds, update_seconds
from penstock.plan.constants import BAND, FITTED, Constants
from penstock.plan.hardware import Cluster
from penstock.plan.job import Job
from penstock.plan.timeline import Timeline, Transfers, Unit, simulate

_MIB = 2**20
_HOST_COPY_GB_S = 20.0  # of a device to pinned memory, PCIe 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One training step; the parts in seconds add up to `step_s`."""

    step_s: float
    compute_s: float
    exposed_s: dict[Link, float]
    """Waiting for collectives, by what they go through: `node` or `network`."""
    bubble_s: float
    """Waiting for other stages of the pipeline."""
    stall_s: float
    """Of the memory allocator."""
    update_s: float
    """Of the optimizer."""
    data_s: float
    """Waiting for the loader."""
    checkpoint_s: float
    """Copying for checkpoints, spread over the steps between them."""
    straggler_s: float
    """Waiting for the slowest device."""
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    network_gbit_s: float
    """That a node sends, on average over the step."""
    network_bytes: float
    """That a node sends in a step."""
    band: float
    """The truth is within this share of `tokens_per_s_per_device` for 19 in 20 published measurements."""

    @property
    def limit(self) -> str:
        """The largest part of the step."""
        parts = {
            "computing": self.compute_s + self.update_s,
            "links in the node": self.exposed_s["node"],
            "the network": self.exposed_s["network"],
            "the pipeline's bubble": self.bubble_s,
            "the memory allocator": self.stall_s,
            "the loader": self.data_s,
            "checkpoints": self.checkpoint_s,
            "slow devices": self.straggler_s,
        }
        return max(parts, key=lambda part: parts[part])


def predict(job: Job, cluster: Cluster, constants: Constants = FITTED) -> Prediction:
    """Predict one step of a job.

    Raises:
        ConfigError: the job does not fill the cluster, or asks for what is not modelled.
    """
    _check(job, cluster)
    line = timeline_of(job, cluster, constants)
    bubble = _bubble(job, cluster, line)
    update = update_seconds(job, cluster.device)
    outer = _outer(job, cluster)
    spread = cluster.straggling if cluster.straggling >= 0 else constants.straggling
    computed = line.compute_s + update
    straggler = computed * spread * math.sqrt(2 * math.log(job.layout.world_size))
    busy = line.seconds + bubble + update + outer.seconds + straggler
    data = max(0.0, job.step_tokens / job.layout.num_data / job.data_tokens_per_s - busy)
    checkpoint = _checkpoint(job, cluster, busy + data)
    step = busy + data + checkpoint
    exposed = dict(line.exposed_s)
    if outer.link != "none":
        exposed[outer.link] += outer.seconds
    rate = job.step_tokens / step / job.layout.world_size
    flops = job.model.flops_per_token(job.sequence_length)
    peak = 1e12 * (
        cluster.device.float32_tflops if job.compute == "float32" else cluster.device.bfloat16_tflops
    )
    mfu = rate * flops / peak
    sent = line.node_bytes + outer.node_bytes
    return Prediction(
        step_s=step,
        compute_s=line.compute_s,
        exposed_s={"node": exposed["node"], "network": exposed["network"]},
        bubble_s=bubble,
        stall_s=max(0.0, line.seconds - line.compute_s - sum(line.exposed_s.values())),
        update_s=update,
        data_s=data,
        checkpoint_s=checkpoint,
        straggler_s=straggler,
        tokens_per_s_per_device=rate,
        mfu=mfu,
        hfu=mfu * (1 + job.block_modes.count("full") / len(job.block_modes) / 3),
        network_gbit_s=8e-9 * sent / step,
        network_bytes=sent,
        band=BAND,
    )


def _check(job: Job, cluster: Cluster) -> None:
    if job.layout.world_size != cluster.num_devices:
        raise ConfigError(
            f"The layout has {job.layout.world_size} ranks, and the cluster {cluster.num_devices} devices",
            got=str(job.layout),
            fix="Choose degrees whose product is the number of devices.",
        )
    if job.linear != "compute" and not cluster.device.float8_tflops:
        raise ConfigError(
            f"{cluster.device.name} has no 8-bit products, and emulated ones are not modelled",
            got=job.linear,
            fix="Leave precision.linear at 'compute'.",
        )


def timeline_of(
    job: Job, cluster: Cluster, constants: Constants = FITTED, *, record: bool = False
) -> Timeline:
    """Simulate a rank's part of a step, without its update."""
    groups = groups_of(job.layout, cluster)
    units = _contended(_units(job, cluster, constants, groups), job, constants)
    return simulate(
        units,
        num_micro_batches=job.num_micro_batches,
        window=window_of(job, len(units)),
        overlapped=job.overlapped,
        record=record,
    )


def window_of(job: Job, num_units: int) -> int:
    """Return how many blocks may be gathered at a time."""
    if math.isinf(job.window_mib):
        return 2 * num_units
    block = job.block_parameters * job.compute_bytes / job.layout.tensor
    return max(1, int(job.window_mib * _MIB // block)) if job.window_mib else 2


def kept_blocks(job: Job, num_blocks: int) -> int:
    """Return how many blocks stay gathered, and their gradients unreduced, through a step."""
    if job.layout.pipeline > 1 or math.isinf(job.keep_mib):
        return num_blocks
    block = job.block_parameters / job.layout.tensor * (job.compute_bytes + 4)
    return min(num_blocks, int(job.keep_mib * _MIB // block))


def _units(job: Job, cluster: Cluster, constants: Constants, groups: dict[str, Group]) -> list[Unit]:
    seconds = block_seconds(job, cluster.device, constants)
    inline = _inline(job, cluster, groups)
    in_block = _transfers(job, cluster, groups, job.block_parameters)
    modes = job.block_modes[:: job.layout.pipeline]
    kept = kept_blocks(job, len(modes))
    blocks = [
        Unit(
            name=f"block {index}",
            forward=seconds.forward,
            backward=seconds.backward + again_seconds(seconds, mode),
            inline=inline.seconds,
            inline_link=inline.link,
            kept=index < kept,
            transfers=in_block,
        )
        for index, mode in enumerate(modes)
    ]
    head = head_seconds(job, cluster.device, constants)
    head = Seconds(head.forward / job.layout.pipeline, head.backward / job.layout.pipeline, 0.0)
    outside = _transfers(job, cluster, groups, job.outside / job.layout.pipeline)._replace(again=FREE)
    whole = math.isinf(job.keep_mib) or job.layout.pipeline > 1
    ends = Unit(name="head", forward=head.forward, backward=head.backward, kept=whole, transfers=outside)
    return [*blocks, ends]


def _transfers(job: Job, cluster: Cluster, groups: dict[str, Group], parameters: float) -> Transfers:
    """Return the collectives over a unit's parameters."""
    mine = parameters / job.layout.tensor
    over = groups["shard"]
    gather = ring(mine * job.gather_bytes, over, cluster)
    again = gather if job.reshard_after_forward else FREE
    if not isinstance(job.reshard_after_forward, bool):
        stays = Group(job.reshard_after_forward, 1, 1)
        again = ring(mine * job.gather_bytes, stays, cluster)
    across = FREE
    if not job.outer_every:
        across = all_reduce(mine * job.reduce_bytes / job.shard_ranks, groups["replicate"], cluster)
    return Transfers(gather, again, ring(mine * job.reduce_bytes, over, cluster), across)


def _inline(job: Job, cluster: Cluster, groups: dict[str, Group]) -> Cost:
    """Return the collectives of one block's forward that computing waits for."""
    model, size = job.model, job.compute_bytes
    tokens = job.rank_tokens
    tensor = ring(4 * tokens * model.hidden_size * size, groups["tensor"], cluster)
    values = 2 * job.rows_tokens * model.key_value_heads * model.size_of_head * size / job.layout.tensor
    context = ring(values, groups["context"], cluster)
    link: Link = max(tensor, context).link
    return Cost(tensor.seconds + context.seconds, link, tensor.node_bytes + context.node_bytes)


def _contended(units: list[Unit], job: Job, constants: Constants) -> list[Unit]:
    """Return units whose computing is slowed by the collectives beside it."""
    computing = sum(unit.forward + unit.backward for unit in units)
    beside = sum(cost.seconds for unit in units for cost in unit.transfers[:3])
    if not job.overlapped or not beside:
        return units
    slower = 1 + constants.contention * min(1.0, beside / computing)
    return [replace(unit, forward=unit.forward * slower, backward=unit.backward * slower) for unit in units]


def _bubble(job: Job, cluster: Cluster, line: Timeline) -> float:
    """Return what a rank of a pipeline waits while it fills and empties: 1F1B, interleaved or not."""
    stages = job.layout.pipeline
    if stages == 1:
        return 0.0
    groups = groups_of(job.layout, cluster)
    hop = send(
        job.rank_tokens * job.model.hidden_size * job.compute_bytes / job.layout.tensor,
        groups["pipeline"],
        cluster,
    )
    one = (line.compute_s + sum(line.exposed_s.values())) / job.num_micro_batches
    return (stages - 1) * (one / job.stages_per_rank + 2 * hop.seconds)


def _outer(job: Job, cluster: Cluster) -> Cost:
    """Return the synchronisation of copies, spread over the steps between two."""
    if not job.outer_every:
        return FREE
    mine = job.model.num_parameters / job.layout.tensor / job.layout.pipeline / job.shard_ranks
    cost = ring(mine * job.outer_bits / 8, groups_of(job.layout, cluster)["replicate"], cluster, rounds=2)
    return Cost(cost.seconds / job.outer_every, cost.link, cost.node_bytes / job.outer_every)


def _checkpoint(job: Job, cluster: Cluster, steps_s: float) -> float:
    """Return what saving holds up, a step: the copy to the machine's memory, and a disk that is too slow.

    Args:
        steps_s: that one step takes without it.
    """
    if not job.checkpoint_every:
        return 0.0
    saved = job.state_bytes * job.model.num_parameters
    copied = saved / cluster.num_devices / (_HOST_COPY_GB_S * 1e9)
    written = saved / cluster.nodes / (cluster.disk_gb_s * 1e9)
    return max(copied, written - job.checkpoint_every * steps_s) / job.checkpoint_every

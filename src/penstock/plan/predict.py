"""Prediction of a training step: its duration and its parts, from a job and a cluster; no torch.

The arithmetic is in `compute.py` and `comm.py`, the cost of a block in `block_costs.py`, the waiting in
`timeline.py`; here they are combined. Accuracy against published measurements: docs/explanation/planner.md.
"""

import math
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.plan.block_costs import units_of, window_of
from penstock.plan.comm import FREE, Cost, Link, groups_of, ring, send
from penstock.plan.compute import FITTED, HOST_COPY_GB_S, RETRANSMISSION_S, Constants, update_seconds
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.timeline import StepTimeline, simulate

_BAND, _BAND_8_BITS, _BAND_CUT, _BAND_FAR = 0.15, 0.21, 0.35, 0.50
_LONG_ROW = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted training step; the parts in seconds add up to `step_s`."""

    step_s: float
    compute_s: float
    exposed_s: dict[Link, float]
    """Waiting for collectives, by link: `node` or `network`."""
    bubble_s: float
    """Waiting for other stages of the pipeline."""
    stall_s: float
    """Waiting for the memory allocator."""
    update_s: float
    """Optimizer update."""
    data_s: float
    """Waiting for the loader."""
    checkpoint_s: float
    """Copying for checkpoints, per step on average."""
    straggler_s: float
    """Waiting for the slowest device."""
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    network_gbit_s: float
    """Mean rate at which a node sends during the step."""
    network_bytes: float
    """Bytes that a node sends in a step."""
    band: float
    """Half-width of the error band: 19 of 20 published measurements of such jobs are within this share."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by cause; they add up to it."""
        return {
            "computing": self.compute_s,
            "the optimizer": self.update_s,
            "links in the node": self.exposed_s["node"],
            "the network": self.exposed_s["network"],
            "the pipeline's bubble": self.bubble_s,
            "the memory allocator": self.stall_s,
            "the loader": self.data_s,
            "checkpoints": self.checkpoint_s,
            "slow devices": self.straggler_s,
        }

    @property
    def limit(self) -> str:
        """Name of the largest part of the step."""
        return max(self.parts, key=lambda part: self.parts[part])


def predict(
    job: TrainingStep, cluster: Cluster, constants: Constants = FITTED, *, memory_bytes: float = 0.0
) -> Prediction:
    """Predict one step of a job.

    Args:
        memory_bytes: peak memory of a rank (`memory.peak`); if little is left, the allocator stalls.

    Raises:
        ConfigError: the job does not use the whole cluster, or uses a feature that is not modelled.
    """
    check(job, cluster)
    line = timeline_of(job, cluster, constants, memory_bytes=memory_bytes)
    outer = _outer(job, cluster)
    bubble, update = _bubble(job, cluster, line), update_seconds(job, cluster.device, constants)
    straggler = (line.compute_s + update) * straggling_of(cluster, constants)
    straggler += retransmission_seconds(cluster, line, constants)
    busy = line.seconds + bubble + update + outer.seconds + straggler
    data = max(0.0, job.step_tokens / job.layout.num_data / job.data_tokens_per_s - busy)
    checkpoint = _checkpoint(job, cluster, busy + data)
    step = busy + data + checkpoint
    exposed = dict(line.exposed_s)
    if outer.link != "none":
        exposed[outer.link] += outer.seconds
    rate = job.step_tokens / step / job.layout.world_size
    mfu = rate * job.model.flops_per_token(job.sequence_length) / _peak(job, cluster)
    sent = (
        line.node_bytes + outer.node_bytes + _messages_of_stages(job, cluster) * _hop(job, cluster).node_bytes
    )
    return Prediction(
        step_s=step,
        compute_s=line.compute_s,
        exposed_s=exposed,
        bubble_s=bubble,
        stall_s=line.stalled_s,
        update_s=update,
        data_s=data,
        checkpoint_s=checkpoint,
        straggler_s=straggler,
        tokens_per_s_per_device=rate,
        mfu=mfu,
        hfu=mfu * (1 + job.block_modes.count("full") / len(job.block_modes) / 3),
        network_gbit_s=8e-9 * sent / step,
        network_bytes=sent,
        band=band_of(job),
    )


def check(job: TrainingStep, cluster: Cluster) -> None:
    """Refuse a job that is not modelled.

    Raises:
        ConfigError: the fix names what is modelled.
    """
    if job.layout.world_size != cluster.num_devices:
        raise ConfigError(
            f"The layout has {job.layout.world_size} ranks, and the cluster {cluster.num_devices} devices",
            got=str(job.layout),
            fix="Choose degrees whose product is the number of devices.",
        )
    if job.linear == "mxfp8" or (job.linear != "compute" and not cluster.device.float8_tflops):
        raise ConfigError(
            f"precision.linear is not modelled on {cluster.device.name}",
            got=job.linear,
            fix="Use 'compute', or 'float8_tensorwise' or 'float8_rowwise' on a device with float8 products.",
        )
    if job.outer_every and job.layout.replicate == 1:
        raise ConfigError(
            "outer.every synchronises the replicas of parallel.replicate, but there is only one",
            got=job.outer_every,
            fix="Raise parallel.replicate, or set outer.every = 0.",
        )


def timeline_of(
    job: TrainingStep,
    cluster: Cluster,
    constants: Constants = FITTED,
    *,
    memory_bytes: float = 0.0,
    record: bool = False,
) -> StepTimeline:
    """Simulate a rank's part of a step, without its update."""
    units = units_of(job, cluster, constants, memory_bytes=memory_bytes)
    window = window_of(job, cluster, num_units=len(units))
    return simulate(
        units,
        num_micro_batches=job.num_passes,
        window=window,
        turning=min(window, 2) if job.turning else 0,
        overlapped=job.overlapped,
        record=record,
    )


def band_of(job: TrainingStep) -> float:
    """Return the half-width of the error band: 19 of 20 held-out rows are within it.

    docs/explanation/planner.md lists the rows.
    """
    layout = job.layout
    if layout.context > 1 or job.sequence_length > _LONG_ROW:
        return _BAND_FAR
    if layout.tensor * layout.pipeline > 1:
        return _BAND_CUT
    return _BAND if job.linear == "compute" else _BAND_8_BITS


def straggling_of(cluster: Cluster, constants: Constants = FITTED) -> float:
    """Return the slowest device's expected delay over the mean: s sqrt(2 ln n) for n devices of spread s."""
    spread = cluster.straggling if cluster.straggling >= 0 else constants.straggling
    return spread * math.sqrt(2 * math.log(cluster.num_devices))


def retransmission_seconds(cluster: Cluster, line: StepTimeline, constants: Constants = FITTED) -> float:
    """Return the time per step lost to TCP segments; 0 over RDMA, or if straggling was measured.

    A segment lost at the end of a burst is sent again after the retransmission timeout, and a ring waits for
    its slowest link. Losses are proportional to the bytes that all nodes send in collectives, so the wait
    grows with nodes x bytes per node, until every collective of the step waits for one: with l losses over c
    collectives, c (1 - exp(-l / c)). Messages between stages of a pipeline, and the synchronisation of
    replicas by `outer.every`, are not counted.
    """
    if cluster.transport != "tcp" or cluster.straggling >= 0 or not line.node_bytes:
        return 0.0
    losses = constants.losses_per_byte * cluster.nodes * line.node_bytes
    return RETRANSMISSION_S * -line.network_operations * math.expm1(-losses / line.network_operations)


def _peak(job: TrainingStep, cluster: Cluster) -> float:
    device = cluster.device
    return 1e12 * (device.float32_tflops if job.compute == "float32" else device.bfloat16_tflops)


def _bubble(job: TrainingStep, cluster: Cluster, line: StepTimeline) -> float:
    """Return the time a pipeline rank waits for others: 1F1B, interleaved or not.

    Filling and emptying cost (p - 1) / v micro-batches and their messages. Between them every micro-batch of
    every stage waits for a message forward and one backward, unless they travel beside computing.
    """
    stages = job.layout.pipeline
    if stages == 1:
        return 0.0
    hop = _hop(job, cluster)
    one = (line.compute_s + sum(line.exposed_s.values())) / job.num_micro_batches
    steady = 0 if job.messages_overlapped else job.num_micro_batches * job.stages_per_rank
    return (stages - 1) * one / job.stages_per_rank + 2 * hop.seconds * (stages - 1 + steady)


def _hop(job: TrainingStep, cluster: Cluster) -> Cost:
    """Return the cost of one micro-batch's message to another stage of a pipeline."""
    size = job.rank_tokens * job.model.hidden_size * job.compute_bytes / job.layout.tensor
    return send(size, groups_of(job.layout, cluster)["pipeline"], cluster)


def _messages_of_stages(job: TrainingStep, cluster: Cluster) -> int:
    """Return the messages that a node sends for one pipeline in a step, the node that sends most.

    Forward they leave it from its last rank, backward from its first. The first stage sends none backward,
    and the last none forward: of two nodes, each has one of them.
    """
    at_an_end = groups_of(job.layout, cluster)["pipeline"].nodes == 2
    return job.num_micro_batches * (2 * job.stages_per_rank - at_an_end)


def _outer(job: TrainingStep, cluster: Cluster) -> Cost:
    """Return the cost of synchronising replicas, per step on average."""
    if not job.outer_every:
        return FREE
    cost = ring(
        job.learned_of_rank * job.outer_bytes, groups_of(job.layout, cluster)["replicate"], cluster, rounds=2
    )
    every = job.outer_every
    return cost._replace(seconds=cost.seconds / every, node_bytes=cost.node_bytes / every)


def _checkpoint(job: TrainingStep, cluster: Cluster, steps_s: float) -> float:
    """Return the delay per step by saving: the copy to host memory, and a disk that is too slow.

    Args:
        steps_s: duration of one step without it.
    """
    if not job.checkpoint_every:
        return 0.0
    layout = job.layout
    saved = job.state_bytes * job.learned_of_rank * layout.tensor * layout.pipeline * job.shard_ranks
    copied = saved / cluster.num_devices / (HOST_COPY_GB_S * 1e9)
    written = saved / cluster.nodes / (cluster.disk_gb_s * 1e9)
    return max(copied, written - job.checkpoint_every * steps_s) / job.checkpoint_every

"""Predict a training step: its seconds and where they go, from a job and a cluster; no torch.

The arithmetic is in `compute.py` and `comm.py`, what a block costs in `units.py`, the waiting in
`timeline.py`; here they are put together. How near they come to what others measured: docs/planner.md.
"""

import math
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.plan.comm import FREE, Cost, Link, groups_of, ring, send
from penstock.plan.compute import update_seconds
from penstock.plan.constants import FITTED, HOST_COPY_GB_S, Constants
from penstock.plan.hardware import Cluster
from penstock.plan.job import Job
from penstock.plan.timeline import Timeline, simulate
from penstock.plan.units import units_of, window_of

_BAND, _BAND_8_BITS, _BAND_TENSOR, _BAND_FAR = 0.15, 0.20, 0.35, 0.50
_LONG_ROW = 16384


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
    """Of 20 published measurements of such jobs, 19 were within this share of the prediction."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by what they are spent on; they add up to it."""
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
        """The largest part of the step."""
        return max(self.parts, key=lambda part: self.parts[part])


def predict(job: Job, cluster: Cluster, constants: Constants = FITTED) -> Prediction:
    """Predict one step of a job.

    Raises:
        ConfigError: the job does not fill the cluster, or asks for what is not modelled.
    """
    check(job, cluster)
    line, outer = timeline_of(job, cluster, constants), _outer(job, cluster)
    bubble, update = _bubble(job, cluster, line), update_seconds(job, cluster.device, constants)
    straggler = (line.compute_s + update) * straggling_of(cluster, constants)
    busy = line.seconds + bubble + update + outer.seconds + straggler
    data = max(0.0, job.step_tokens / job.layout.num_data / job.data_tokens_per_s - busy)
    checkpoint = _checkpoint(job, cluster, busy + data)
    step = busy + data + checkpoint
    exposed = dict(line.exposed_s)
    if outer.link != "none":
        exposed[outer.link] += outer.seconds
    rate = job.step_tokens / step / job.layout.world_size
    mfu = rate * job.model.flops_per_token(job.sequence_length) / _peak(job, cluster)
    sent = line.node_bytes + outer.node_bytes
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


def check(job: Job, cluster: Cluster) -> None:
    """Refuse what is not modelled.

    Raises:
        ConfigError: with what would be.
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
            "outer.every synchronises the copies of parallel.replicate, and there is one copy",
            got=job.outer_every,
            fix="Raise parallel.replicate, or set outer.every = 0.",
        )


def timeline_of(
    job: Job, cluster: Cluster, constants: Constants = FITTED, *, record: bool = False
) -> Timeline:
    """Simulate a rank's part of a step, without its update."""
    units = units_of(job, cluster, constants)
    window = window_of(job, cluster, num_units=len(units))
    return simulate(
        units,
        num_micro_batches=job.num_micro_batches,
        window=window,
        turning=min(window, 2) if job.turning else 0,
        overlapped=job.overlapped,
        record=record,
    )


def band_of(job: Job) -> float:
    """Return the half-width of the band around a prediction; see docs/planner.md for the rows behind it."""
    layout = job.layout
    if layout.pipeline * layout.context > 1 or job.sequence_length > _LONG_ROW:
        return _BAND_FAR
    if layout.tensor > 1:
        return _BAND_TENSOR
    return _BAND if job.linear == "compute" else _BAND_8_BITS


def straggling_of(cluster: Cluster, constants: Constants = FITTED) -> float:
    """Return how much later than the mean the slowest device is: of n with spread s, s sqrt(2 ln n)."""
    if cluster.straggling >= 0:
        return cluster.straggling * _slowest(cluster.num_devices)
    jitter = constants.jitter * _slowest(cluster.nodes) if cluster.transport == "tcp" else 0.0
    return constants.straggling * _slowest(cluster.num_devices) + jitter


def _slowest(number: int) -> float:
    return math.sqrt(2 * math.log(number))


def _peak(job: Job, cluster: Cluster) -> float:
    device = cluster.device
    return 1e12 * (device.float32_tflops if job.compute == "float32" else device.bfloat16_tflops)


def _bubble(job: Job, cluster: Cluster, line: Timeline) -> float:
    """Return what a rank of a pipeline waits while it fills and empties: 1F1B, interleaved or not."""
    stages = job.layout.pipeline
    if stages == 1:
        return 0.0
    size = job.rank_tokens * job.model.hidden_size * job.compute_bytes / job.layout.tensor
    hop = send(size, groups_of(job.layout, cluster)["pipeline"], cluster)
    one = (line.compute_s + sum(line.exposed_s.values())) / job.num_micro_batches
    return (stages - 1) * (one / job.stages_per_rank + 2 * hop.seconds)


def _outer(job: Job, cluster: Cluster) -> Cost:
    """Return the synchronisation of copies, spread over the steps between two."""
    if not job.outer_every:
        return FREE
    mine = job.model.num_parameters / job.layout.tensor / job.layout.pipeline / job.shard_ranks
    cost = ring(mine * job.outer_bytes, groups_of(job.layout, cluster)["replicate"], cluster, rounds=2)
    every = job.outer_every
    return cost._replace(seconds=cost.seconds / every, node_bytes=cost.node_bytes / every)


def _checkpoint(job: Job, cluster: Cluster, steps_s: float) -> float:
    """Return what saving holds up, a step: the copy to the machine's memory, and a disk that is too slow.

    Args:
        steps_s: that one step takes without it.
    """
    if not job.checkpoint_every:
        return 0.0
    saved = job.state_bytes * job.model.num_parameters
    copied = saved / cluster.num_devices / (HOST_COPY_GB_S * 1e9)
    written = saved / cluster.nodes / (cluster.disk_gb_s * 1e9)
    return max(copied, written - job.checkpoint_every * steps_s) / job.checkpoint_every

"""How fast a model generates: what a step of decoding reads, and what it waits for; no torch.

A step makes one token for each sequence of the batch. It reads every weight once and the cache of each
sequence once, at the speed of the memory; multiplies, which is what takes longer from some batch on; and
waits: for each small kernel to fill and empty the device, for two all-reduces a block where the matrices are
cut, and, where the kernels are not replayed as a CUDA graph, for the host that starts them one by one. At
batch 1 the weights alone say the bound (the roofline); what is above it is waiting. `docs/planner.md`
takes 29 ms a token apart.

Prefill is the forward pass of training. What is not modelled: queues of requests, batches of mixed lengths,
speculative decoding, pipelines.
"""

import math
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.models.llama.config import LlamaConfig
from penstock.parallel.layout import Layout
from penstock.plan.comm import all_reduce, group
from penstock.plan.compute import block_seconds, head_seconds, speed
from penstock.plan.constants import FITTED, HOP_S, LINK_SHARE, Constants
from penstock.plan.hardware import Cluster
from penstock.plan.job import Job

BAND = 0.2
"""Half-width of the band: the 95th percentile of the errors on gpt-fast's measurements."""

_READ_SHARE = {16: 0.83, 8: 0.70, 4: 0.60}
"""Of the memory's bandwidth that matrix-vector products reach, by the bits of a weight: gpt-fast's authors
see 1,700 of 2,039 GB/s; 8 and 4 bits are *fitted* to their Llama 2 70B on one A100."""
_KERNELS = 12
"""Of a block in one step of decoding, compiled."""
_KERNEL_S = 4.5e-6
"""Filling and emptying the device around a small kernel: *fitted* to gpt-fast's Llama 2 7B on one A100."""
_HOST_BLOCK_S = 350e-6
"""For which the host is busy to start the kernels of a block one by one: *fitted* to IBM's 29 ms, about 30
kernels at 10 us and two collectives at 25. gpt-fast began at three times that, uncompiled."""
_SCALES = {16: 0, 8: 0, 4: 1}
"""Bits for scale and zero, a weight: 4-bit weights share 32 of them by 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """A model that generates on one group of tensor-parallel devices."""

    model: LlamaConfig
    tensor: int = 1
    batch: int = 1
    """Sequences that are generated at the same time."""
    context_tokens: int = 1024
    """Length of a sequence so far, on average."""
    prompt_tokens: int = 512
    weight_bits: Literal[4, 8, 16] = 16
    graphs: bool = True
    """A step is replayed as a CUDA graph; otherwise the host starts every kernel."""
    one_shot: bool = True
    """Small all-reduces read all devices of the node at once, as with torch's symmetric memory; otherwise
    they go around NCCL's ring."""

    def __post_init__(self) -> None:
        for name in ("tensor", "batch", "context_tokens", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of generation must be 1 or more", got=getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePrediction:
    """One step of decoding; the parts add up to `token_s`."""

    token_s: float
    """Time per token of each sequence (TPOT)."""
    memory_s: float
    """Reading weights and cache: the roofline of small batches."""
    compute_s: float
    """Of multiplying, what does not hide behind reading."""
    kernels_s: float
    collectives_s: float
    host_s: float
    """Waiting for the host to start kernels."""
    prefill_s: float
    """Of the batch's prompts: time to first token, if nothing waits before it."""
    tokens_per_s: float
    """Of all sequences together."""
    device_bytes: float
    """Weights and cache on one device."""
    band: float


def predict_decode(job: DecodeJob, cluster: Cluster, constants: Constants = FITTED) -> DecodePrediction:
    """Predict one step of decoding.

    Args:
        cluster: whose first `tensor` devices are used.

    Raises:
        ConfigError: it has fewer devices, or weights and cache do not fit into them.
    """
    held = device_bytes(job)
    _check(job, cluster, held)
    device, blocks = cluster.device, job.model.num_hidden_layers
    memory = held / (_READ_SHARE[job.weight_bits] * device.memory_gb_s * 1e9)
    compute = max(0.0, _flops(job) / job.tensor / _speed(job, cluster, constants) - memory)
    message = _all_reduce_s(job, cluster, tokens=job.batch)
    kernels = blocks * _KERNELS * _KERNEL_S
    collectives = blocks * 2 * message
    busy = memory + compute + kernels + collectives
    host = 0.0 if job.graphs else max(0.0, blocks * _HOST_BLOCK_S - busy)
    return DecodePrediction(
        token_s=busy + host,
        memory_s=memory,
        compute_s=compute,
        kernels_s=kernels,
        collectives_s=collectives,
        host_s=host,
        prefill_s=_prefill_s(job, cluster, constants),
        tokens_per_s=job.batch / (busy + host),
        device_bytes=held,
        band=BAND,
    )


def _all_reduce_s(job: DecodeJob, cluster: Cluster, *, tokens: int) -> float:
    size = 2 * tokens * job.model.hidden_size
    over = group(job.tensor, stride=1, devices_per_node=cluster.devices_per_node)
    by_ring = all_reduce(size, over, cluster).seconds
    if not job.one_shot or over.nodes > 1 or over.ranks == 1:
        return by_ring
    return min(by_ring, 2 * HOP_S + size * (over.ranks - 1) / (LINK_SHARE * cluster.device.link_gb_s * 1e9))


def device_bytes(job: DecodeJob) -> float:
    """Return bytes of weights that a step reads, and of the cache, on one device."""
    model = job.model
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    bits = job.weight_bits + _SCALES[job.weight_bits]
    weights = (model.num_parameters - looked_up) * bits / 8 / job.tensor
    seen = sum(min(job.context_tokens, window or job.context_tokens) for window in model.windows)
    heads = math.ceil(model.key_value_heads / job.tensor)
    return weights + job.batch * seen * 2 * heads * model.size_of_head * 2


def _check(job: DecodeJob, cluster: Cluster, held: float) -> None:
    if job.tensor > cluster.num_devices:
        raise ConfigError(
            f"The cluster has {cluster.num_devices} devices", got=job.tensor, fix="Lower the tensor degree."
        )
    room = cluster.device.memory_gib * 2**30
    if held > room:
        raise ConfigError(
            f"Weights and cache take {held / 2**30:.1f} of a device's {cluster.device.memory_gib:.0f} GiB",
            got=f"tensor {job.tensor}, batch {job.batch}, context {job.context_tokens}",
            fix="Raise the tensor degree, or lower the batch, the context or the bits.",
        )


def _flops(job: DecodeJob) -> float:
    model = job.model
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    pairs = 4 * model.num_attention_heads * model.size_of_head * job.context_tokens * model.num_hidden_layers
    return float(job.batch * (2 * (model.num_parameters - looked_up) + pairs))


def _speed(job: DecodeJob, cluster: Cluster, constants: Constants) -> float:
    return speed(_forward(job), cluster.device, constants, plain=True)


def _forward(job: DecodeJob) -> Job:
    """Return the prompts of the batch as a job whose forward pass is the prefill."""
    return Job(
        model=job.model,
        layout=Layout(tensor=job.tensor),
        sequence_length=job.prompt_tokens,
        micro_batch_size=job.batch,
        kernels="compiled" if job.graphs else "fused",
    )


def _prefill_s(job: DecodeJob, cluster: Cluster, constants: Constants) -> float:
    forward = _forward(job)
    sent = _all_reduce_s(job, cluster, tokens=job.batch * job.prompt_tokens)
    block = block_seconds(forward, cluster.device, constants).forward
    head = head_seconds(forward, cluster.device, constants).forward
    return job.model.num_hidden_layers * (block + 2 * sent) + head

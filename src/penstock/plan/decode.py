"""Decode model: predicts generation from bytes read and time waited per decode step; compares tensor degrees.

A step makes one token for each sequence of the batch. It reads every weight once and the cache of each
sequence once, at memory speed; multiplies, which dominates from some batch size on; and waits: for each small
kernel to fill and empty the device, for two all-reduces per block under tensor parallelism, and, if the
kernels are not replayed as a CUDA graph, for the host that launches them one by one. At batch 1 the weights
alone give the bound (the roofline); the rest is waiting. `docs/explanation/planner.md` analyses an example of
29 ms per token.

Prefill is the forward pass of training. Not modelled: queues of requests, batches of mixed lengths,
speculative decoding, pipelines.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from penstock.core.errors import ConfigError
from penstock.core.units import mib
from penstock.devices.figures import Architecture, Device
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.layer_kind import LayerKind
from penstock.parallel.layout import RankLayout
from penstock.plan.candidates import divisors
from penstock.plan.comm import HOP_S, LINK_SHARE, all_reduce, group
from penstock.plan.compute import FITTED, GAP_S, Constants, block_passes, block_seconds, head_seconds, speed
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep

BAND = 0.2
"""Half-width of the error band: the 95th percentile of the errors on gpt-fast's measurements."""

_READ_SHARE = {16: 0.83, 8: 0.70, 4: 0.60}
"""Share of the memory bandwidth that matrix-vector products reach, by bits per weight: gpt-fast's authors
report 1,700 of 2,039 GB/s; 8 and 4 bits are *fitted* to their Llama 2 70B on one A100."""
_KERNELS = {True: 13, False: 25}
"""Number of kernels of a block of two parts in one decode step, compiled (counted on the null GPU) or not (on
an H200)."""
_BY_NUMBER = {True: 1.0, False: 0.5}
"""Speed of passes over activations relative to that of passes over memory: kernels that are not compiled read
parts of merged rows and turned halves by the number, not 16 bytes at a time."""
_KERNEL_S: Mapping[Architecture, float] = {"hopper": GAP_S, "blackwell": GAP_S}
"""Seconds to fill and empty the device around a small kernel in a CUDA graph, where known."""
_KERNEL_OLDER_S = 4.15e-6
"""The same on other architectures: *fitted* to gpt-fast's Llama 2 7B on one A100."""
_HOST_BLOCK_S = 350e-6
"""Host seconds to launch the kernels of a block of two parts one by one: *fitted* to IBM's 29 ms, about 30
kernels at 10 us and two collectives at 25. gpt-fast reports three times that, uncompiled."""
_MEASURED = {"H100-80GB": "2026-11-26", "H200": "2026-11-28"}
"""Devices on which Penstock's engine ran, with the date of the result."""
_SCALES = {16: 0, 8: 0, 4: 1}
"""Bits per weight for scale and zero: 32 weights of 4 bits share 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """Generation job: a model on one group of tensor-parallel devices."""

    model: DecoderConfig
    tensor: int = 1
    batch: int = 1
    """Sequences generated at the same time."""
    context_tokens: int = 1024
    """Mean length of a sequence so far, in tokens."""
    prompt_tokens: int = 512
    weight_bits: Literal[4, 8, 16] = 16
    graphs: bool = True
    """True if a step is replayed as a CUDA graph; False: the host launches every kernel."""
    compiled: bool = True
    """True if blocks are compiled."""
    one_shot: bool = True
    """True if small all-reduces read all devices of the node at once, as with torch's symmetric memory;
    False: they use NCCL's ring."""

    def __post_init__(self) -> None:
        for name in ("tensor", "batch", "context_tokens", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of generation must be 1 or more", got=getattr(self, name))


def device_bytes(job: DecodeJob) -> float:
    """Return the bytes of weights and cache that a step reads on one device."""
    return _weight_bytes(job) + _cache_bytes(job)


def _weight_bytes(job: DecodeJob) -> float:
    bits = job.weight_bits + _SCALES[job.weight_bits]
    return _multiplied(job.model) * bits / 8 / job.tensor


def _cache_bytes(job: DecodeJob) -> float:
    model = job.model
    seen = sum(min(job.context_tokens, window or job.context_tokens) for window in model.windows)
    heads = math.ceil(model.key_value_heads / job.tensor)
    return job.batch * seen * 2 * heads * model.size_of_head * 2


def _multiplied(model: DecoderConfig) -> int:
    """Return the parameters that every token is multiplied with: all but the embedding's."""
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return model.num_parameters - looked_up


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePrediction:
    """Predicted decode step; the parts add up to `token_s`."""

    token_s: float
    """Time per token of each sequence (TPOT)."""
    memory_s: float
    """Reading weights and cache: the roofline of small batches."""
    compute_s: float
    """Multiplication that is not hidden behind reading."""
    kernels_s: float
    """Between kernels, and in those that pass over activations."""
    collectives_s: float
    host_s: float
    """Waiting for the host to launch kernels."""
    prefill_s: float
    """Prefill of the batch's prompts: time to first token without queueing."""
    tokens_per_s: float
    """Sum over all sequences."""
    device_bytes: float
    """Weights and cache on one device."""
    band: float


def predict_decode(job: DecodeJob, cluster: Cluster, constants: Constants = FITTED) -> DecodePrediction:
    """Predict one decode step.

    Args:
        cluster: its first `tensor` devices are used.

    Raises:
        ConfigError: it has fewer devices, or weights and cache do not fit into their memory.
    """
    held = device_bytes(job)
    _check(job, cluster, held)
    device, kinds = cluster.device, Counter(job.model.layers)
    parts = sum(count * len(kind.parts) for kind, count in kinds.items())
    bytes_s = _READ_SHARE[job.weight_bits] * device.memory_gb_s * 1e9
    memory = held / bytes_s
    multiplied = 2 * job.batch * _multiplied(job.model) / job.tensor / _speed(job, cluster, constants)
    compute = max(0.0, multiplied - _weight_bytes(job) / bytes_s)  # the cache is read before or after
    message = _all_reduce_s(job, cluster, tokens=job.batch)
    launches = parts / 2 * _KERNELS[job.compiled] * _KERNEL_S.get(device.architecture, _KERNEL_OLDER_S)
    passes = sum(count * _passes(job, kind) for kind, count in kinds.items())
    moved = passes * job.batch / job.tensor
    kernels = launches + moved / (_BY_NUMBER[job.compiled] * constants.memory * device.memory_gb_s * 1e9)
    collectives = parts * message
    busy = memory + compute + kernels + collectives
    host = 0.0 if job.graphs else max(0.0, parts / 2 * _HOST_BLOCK_S - busy)
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


def _passes(job: DecodeJob, kind: LayerKind) -> float:
    """Return the bytes per token that a block moves, without its products.

    Not compiled, a block reads and writes numbers as many times as its kernels do: of the hidden width, two
    norms (4; of four, 8) and two sums (6); of queries and keys, attention (2) and the rotation: negate a half
    (1), join the halves (2), multiply twice (4), add (3); of the feed-forward width, the gate (2) and its
    product (3), or ReLU (2) and its square (2).
    """
    if job.compiled:
        return block_passes(_forward(job), kind)
    model = job.model
    numbers = (2 * len(model.block_norms(kind)) + 3 * len(kind.parts)) * model.hidden_size
    if kind.attention is not None:
        numbers += 12 * (model.num_attention_heads + model.key_value_heads) * model.size_of_head
    if kind.feed_forward is not None:
        numbers += (5 if model.family.has_gate else 4) * model.intermediate_size
    return 2.0 * numbers


def _all_reduce_s(job: DecodeJob, cluster: Cluster, *, tokens: int) -> float:
    size = 2 * tokens * job.model.hidden_size
    over = group(job.tensor, stride=1, devices_per_node=cluster.devices_per_node)
    by_ring = all_reduce(size, over, cluster).seconds
    if not job.one_shot or over.nodes > 1 or over.ranks == 1:
        return by_ring
    return min(by_ring, 2 * HOP_S + size * (over.ranks - 1) / (LINK_SHARE * cluster.device.link_gb_s * 1e9))


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


def _speed(job: DecodeJob, cluster: Cluster, constants: Constants) -> float:
    return speed(_forward(job), cluster.device, constants, plain=True)


def _forward(job: DecodeJob) -> TrainingStep:
    """Return the batch's prompts as a training step whose forward pass is the prefill."""
    return TrainingStep(
        model=job.model,
        layout=RankLayout(tensor=job.tensor),
        sequence_length=job.prompt_tokens,
        micro_batch_size=job.batch,
        kernels="compiled" if job.compiled else "fused",
    )


def _prefill_s(job: DecodeJob, cluster: Cluster, constants: Constants) -> float:
    forward = _forward(job)
    sent = _all_reduce_s(job, cluster, tokens=job.batch * job.prompt_tokens)
    seconds = {
        kind: block_seconds(forward, cluster.device, constants, kind).forward + len(kind.parts) * sent
        for kind in set(job.model.layers)
    }
    blocks = sum(seconds[kind] for kind in job.model.layers)
    return blocks + head_seconds(forward, cluster.device, constants).forward


_BATCHES = (1, 8, 32, 128)


class ServingOption(NamedTuple):
    """Tensor degree and batch size with their prediction."""

    job: DecodeJob
    prediction: DecodePrediction


def serving_options(model: DecoderConfig, cluster: Cluster, *, context_tokens: int) -> list[ServingOption]:
    """Return the options that fit: all tensor degrees of a machine, for batches of several sizes.

    Steps run as `penstock serve` runs them: as CUDA graphs on one device, kernel by kernel on several.

    Raises:
        ConfigError: there are no figures for the device, or nothing fits; that message is for the highest
            degree and the smallest batch.
    """
    if cluster.device.architecture == "cpu":
        raise ConfigError(
            "The planner has no figures of the engine on CPUs",
            got=cluster.device.name,
            fix="Name a cluster of GPUs, or measure this machine: python benchmarks/serve.py --quick.",
        )
    options, refused = [], None
    for tensor in divisors(cluster.devices_per_node):
        for batch in _BATCHES:
            job = DecodeJob(
                model=model,
                tensor=tensor,
                batch=batch,
                context_tokens=context_tokens,
                graphs=tensor == 1,
                compiled=tensor == 1,
            )
            try:
                options.append(ServingOption(job, predict_decode(job, cluster)))
            except ConfigError as error:
                refused = refused if batch > 1 else error
    if not options and refused is not None:
        raise refused
    return options


def basis(options: Sequence[ServingOption], device: Device) -> str:
    """Return what the figures of the options rest on."""
    if device.name in _MEASURED:
        found = f"One {device.name} was measured on {_MEASURED[device.name]} (benchmarks/results)"
    else:
        found = f"The engine was never measured on {device.name}: reckoned from its data sheet"
    several = any(option.job.tensor > 1 for option in options)
    return found + (", several devices never." if several else ".")


def as_json(options: Sequence[ServingOption], device: Device) -> list[dict[str, Any]]:
    """Return options as JSON values, with units in their names."""
    told = basis(options, device)
    return [
        {
            "basis": told,
            "tensor": option.job.tensor,
            "batch": option.job.batch,
            "context_tokens": option.job.context_tokens,
            **asdict(option.prediction),
        }
        for option in options
    ]


def as_lines(options: Sequence[ServingOption]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "  tensor  batch  ms/token  tokens/s  tokens/s/device  memory/device  waits most for"
    for option in options:
        job, one = option.job, option.prediction
        parts = {
            "memory": one.memory_s,
            "products": one.compute_s,
            "kernels": one.kernels_s,
            "collectives": one.collectives_s,
            "the host": one.host_s,
        }
        yield (
            f"  {job.tensor:>6}  {job.batch:>5}  {1000 * one.token_s:>8.1f}  {one.tokens_per_s:>8,.0f}  "
            f"{one.tokens_per_s / job.tensor:>15,.0f}  {mib(one.device_bytes):>13}  "
            f"{max(parts, key=lambda part: parts[part])}"
        )

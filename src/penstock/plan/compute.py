"""Compute time of a device: products at a share of its peak, everything else at memory bandwidth.

A block's time is the sum of three: matrix products (2 FLOP a parameter and token forward, 4 backward), causal
attention (half of all pairs; its backward is 2.9 times its forward, Dao, arXiv:2307.08691), and passes over
memory by norms, rotations, gates and residual sums, counted in bytes a token. Eager kernels make several
passes where a compiled one makes one. No kernel starts faster than the host can ask for it.

Those marked *fitted* come from `benchmarks/plan_accuracy.py --fit`, which searches them again over published
measurements; `--held-out` says how well they predict sources they were not fitted to. The others are counted
or stated by their source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.devices.figures import Device
from penstock.models.decoder.layer_kind import LayerKind
from penstock.parallel.activation_checkpointing_plan import Mode
from penstock.plan.job import Kernels, TrainingStep

_KERNELS: dict[Kernels, tuple[int, int]] = {"eager": (45, 80), "fused": (28, 50), "compiled": (16, 30)}
"""Number of kernels of a block of two parts, forward and backward."""
_PASSES: dict[Kernels, tuple[int, int, int]] = {
    "eager": (38, 14, 5),
    "fused": (10, 4, 5),
    "compiled": (8, 2, 3),
}
"""Numbers that a block's forward reads and writes per token, for each of its hidden width, of its queries and
keys, and of its feed-forward width. Eager norms and rotations convert to float32 and back step by step."""
_PAIRS_BACK = 2.5 * 73 / 63
"""Ratio of attention's backward to its forward: 5/2 of the FLOP, at 63% of the peak instead of 73%."""
_NORM_PASSES: dict[Kernels, int] = {"eager": 16, "fused": 2, "compiled": 2}
"""Passes of one norm over its width; those of two are in _PASSES."""
_LOGIT_BYTES = 10
"""Passes of a fused cross entropy over a logit: written, read, gradient written and read, in 2 to 4 bytes."""
_CAST_BYTES = 5
"""Passes over an input of an 8-bit product: read for its scale, read again, written."""
_CODEC_BYTES = 24
"""Passes over a number coded in 8 bits and decoded: maximum of its block, scaled, rounded, clamped, cast;
with eager operators."""


class Seconds(NamedTuple):
    """Compute seconds of one micro-batch on one rank."""

    forward: float
    backward: float
    """Without recomputation."""
    again: float
    """Cheap operators of the forward pass, without products and attention."""


def _sustained() -> Mapping[str, float]:
    return {"cpu": 1.0, "volta": 0.8, "ampere": 0.826, "ada": 0.75, "hopper": 0.661, "blackwell": 0.661}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Parameters of the cost model."""

    sustained: Mapping[str, float] = field(default_factory=_sustained)
    """Share of the peak that large matrix products reach, by architecture; *fitted* for ampere and hopper.
    Blackwell is assumed equal to Hopper; volta and ada are guesses."""
    memory: float = 0.754
    """Share of the memory bandwidth reached by kernels that only move numbers; *fitted*."""
    fill: float = 766.0
    """Fixed cost of a tile of a product, as additional terms of its sums in bfloat16: products with long sums
    come nearer to the peak than those with short ones; *fitted*."""
    contention: float = 0.67
    """Share of its speed that computing loses while a collective runs concurrently; *fitted*."""
    hidden: float = 0.352
    """Share of tensor-parallel collectives that is hidden if they run piece by piece beside the products
    (asynchronous TP); *fitted*."""
    stall_s: float = 0.27
    """Allocator delay for each gather that finds memory over-committed; *fitted* to IBM's 20%."""
    straggling: float = 0.01
    """Usual spread of step times between devices: standard deviation / mean."""
    retry_s: float = 0.0092
    """Allocator delay for each gather if little memory is left: it waits for the device, frees cached blocks
    and retries; *fitted*."""
    losses_per_byte: float = 5e-12
    """TCP segments per sent byte that are lost and sent again only after the timeout; *fitted* to IBM's
    90%."""


def speed(job: TrainingStep, device: Device, constants: Constants, *, plain: bool = False) -> float:
    """Return the FLOP/s of large products: in the type of `linear`, or with `plain` in that of `compute`."""
    peak = constants.sustained[device.architecture] * _peak(job, device)
    if job.linear == "compute" or plain:
        return peak
    slower = ROWWISE if job.linear == "float8_rowwise" else 1.0
    return peak * slower * device.float8_tflops / device.bfloat16_tflops


def attention_speed(job: TrainingStep, device: Device) -> float:
    """Return the FLOP/s of flash attention."""
    shares = ATTENTION_3 if job.attention == "flash3" else ATTENTION
    return shares[device.architecture] * _peak(job, device)


def _peak(job: TrainingStep, device: Device) -> float:
    """Return the FLOP/s of the type of `compute`, at the clock that the device's power limit allows."""
    peak = device.float32_tflops if job.compute == "float32" else device.bfloat16_tflops
    clock: float = device.power_share ** (1 / 3)  # power grows with clock x voltage squared
    return 1e12 * peak * clock


def block_seconds(job: TrainingStep, device: Device, constants: Constants, kind: LayerKind) -> Seconds:
    """Return the compute time of a block on one rank."""
    tokens, tensor = job.rank_tokens, job.layout.tensor
    forward, backward = products(job, _matrices(job, kind), device, constants)
    pairs = attention_flops(job, kind) * tokens / tensor / attention_speed(job, device)
    moved = block_passes(job, kind) * tokens / tensor / _memory(device, constants)
    kernels = [n * len(kind.parts) / 2 for n in _KERNELS[job.kernels]]
    gaps, gaps_back = (n * (GAP_S if device.architecture != "cpu" else 0) for n in kernels)
    host, host_back = (n * device.launch_us / 1e6 for n in kernels)
    return Seconds(
        max(forward + pairs + moved + gaps, host),
        max(backward + _PAIRS_BACK * pairs + 2 * moved + gaps_back, host_back),
        max(moved + gaps, host / 2),
    )


def products(
    job: TrainingStep,
    matrices: list[tuple[float, float]],
    device: Device,
    constants: Constants,
    *,
    plain: bool = False,
) -> tuple[float, float]:
    """Return the time of the products with some matrices, forward and backward.

    Args:
        matrices: rows (terms of the forward's sums) and columns of each, on one rank.
        plain: True: in the type of `compute`, whatever `linear` is.
    """
    tokens, rate = job.rank_tokens, speed(job, device, constants, plain=plain)
    fill = constants.fill * rate / speed(job, device, constants, plain=True)
    forward = sum(n * (k + fill) for k, n in matrices) * tokens
    inputs = sum(k * (n + fill) for k, n in matrices) * tokens
    weights = sum(k * n for k, n in matrices) * (tokens + fill)
    if job.adapter is not None:  # frozen; those of the adapter are thin
        weights = 0.0
    return 2 * forward / rate, 2 * (inputs + weights) / rate


def _matrices(job: TrainingStep, kind: LayerKind) -> list[tuple[float, float]]:
    model, tensor = job.model, job.layout.tensor
    hidden, wide = model.hidden_size, model.intermediate_size / tensor
    heads = model.num_attention_heads * model.size_of_head / tensor
    keys = model.key_value_heads * model.size_of_head / tensor
    inner = 2 * wide if model.family.has_gate else wide
    of_attention = [(hidden, heads + 2 * keys), (heads, hidden)]
    of_mlp = [(hidden, inner), (wide, hidden)]
    return of_attention * (kind.attention is not None) + of_mlp * (kind.feed_forward is not None)


def head_seconds(job: TrainingStep, device: Device, constants: Constants) -> Seconds:
    """Return the time of the output matrix and the loss on one rank; embedding look-ups cost nothing."""
    tokens, model = job.rank_tokens, job.model
    rows = model.vocab_size / job.layout.tensor
    forward, backward = products(job, [(model.hidden_size, rows)], device, constants, plain=True)
    passes = 1.0 if job.kernels == "compiled" else 2.5
    moved = _LOGIT_BYTES * rows * tokens * passes / _memory(device, constants)
    return Seconds(forward + moved / 2, backward + moved / 2, 0.0)


def update_seconds(job: TrainingStep, device: Device, constants: Constants) -> float:
    """Return the time of the optimizer's step: each byte of its state is read and written once."""
    return 2 * job.state_bytes * job.learned_of_rank / _memory(device, constants)


def attention_flops(job: TrainingStep, kind: LayerKind) -> float:
    """Return the FLOP of a block's attention for one token, forward, over all heads and visible tokens."""
    model, length = job.model, job.sequence_length
    if kind.attention is None:
        return 0.0
    keys = _seen(length, kind.attention.window)
    if job.layout.context > 1 and job.context_rule == "all_gather" and not job.context_balanced:
        keys = length  # masked, not skipped; the last rank of a row sees all of it
    return 4 * model.num_attention_heads * model.size_of_head * keys


def _seen(length: int, window: int | None) -> float:
    """Return the average number of visible tokens."""
    if window is None or window >= length:
        return length / 2
    return window - window**2 / (2 * length)


def block_passes(job: TrainingStep, kind: LayerKind) -> float:
    """Return the bytes per token that a block's forward moves, without its products and attention."""
    model, size = job.model, job.compute_bytes
    hidden, wide = model.hidden_size, model.intermediate_size
    heads = model.num_attention_heads * model.size_of_head
    keys = model.key_value_heads * model.size_of_head
    by_hidden, by_heads, by_wide = _PASSES[job.kernels]
    parts, has_attention, has_mlp = len(kind.parts), kind.attention is not None, kind.feed_forward is not None
    by_hidden = by_hidden * parts // 2 + (len(model.block_norms(kind)) - parts) * _NORM_PASSES[job.kernels]
    by_heads, by_wide = by_heads * has_attention, (by_wide - (not model.family.has_gate)) * has_mlp
    moved = float(size * (by_hidden * hidden + by_heads * (heads + keys) + by_wide * wide))
    if job.linear != "compute":
        whole = job.layout.tensor if job.linear == "float8_rowwise" else 1  # cast after they are gathered
        moved += _CAST_BYTES * (parts * hidden * whole + heads * has_attention + wide * has_mlp)
    if job.attention == "plain" and has_attention:
        moved += 6 * size * model.num_attention_heads * job.sequence_length
    return moved


def again_seconds(seconds: Seconds, mode: Mode) -> float:
    """Return the recomputation time of a block's backward."""
    return {"keep": 0.0, "operators": seconds.again, "full": seconds.forward}[mode]


def coding_seconds(numbers: float, device: Device, constants: Constants) -> float:
    """Return the time of an 8-bit codec to encode or decode numbers."""
    return _CODEC_BYTES * numbers / _memory(device, constants)


def _memory(device: Device, constants: Constants) -> float:
    return constants.memory * device.memory_gb_s * 1e9


FITTED: Final = Constants()
ATTENTION: Final = {"cpu": 0.5, "volta": 0.3, "ampere": 0.6, "ada": 0.5, "hopper": 0.35, "blackwell": 0.3}
"""Share of the peak that flash attention reaches: 50 to 73% on A100 (Dao, arXiv:2307.08691), 35% on H100 with
the same code (Shah et al., arXiv:2407.08608). The other architectures are guesses."""
ATTENTION_3: Final = {**ATTENTION, "hopper": 0.6, "blackwell": 0.6}
"""Share of the peak that device-specific attention reaches: 0.65 to 0.75 forward and 0.55 to 0.6 backward on
H100 (Shah et al., arXiv:2407.08608, 740 TFLOP/s); Blackwell is a guess."""
ROWWISE: Final = 0.7
"""Speed of 8-bit products with a scale per row relative to those with one per tensor: nanochat's log has 564
against 740 thousand tokens per second for whole steps."""
GAP_S: Final = 2e-6
"""Seconds between consecutive kernels on a GPU."""
RESERVE_GIB: Final = 6.5
"""GPU memory used by the context, NCCL's buffers, workspaces and the allocator's gaps: published steps whose
planned memory left less than this are 10 to 35% slower than their neighbours."""
RETRANSMISSION_S: Final = 0.2
"""Linux's minimum retransmission timeout in seconds (TCP_RTO_MIN)."""
HOST_COPY_GB_S: Final = 20.0
"""Speed from a device to pinned memory, over PCIe 4 with 16 lanes."""

"""How long a device computes: products at a share of its peak, everything else at the speed of its memory.

A block's time is the sum of three: matrix products (2 FLOP a parameter and token forward, 4 backward), causal
attention (half of all pairs; its backward is 2.9 times its forward, Dao, arXiv:2307.08691), and passes over
memory by norms, rotations, gates and residual sums, counted in bytes a token. Eager kernels make several
passes where a compiled one makes one. No kernel starts faster than the host can ask for it.
"""

from typing import NamedTuple

from penstock.parallel.recompute_plan import Mode
from penstock.plan.constants import ATTENTION, GAP_S, ROWWISE, Constants
from penstock.plan.hardware import Device
from penstock.plan.job import Job, Kernels

_KERNELS: dict[Kernels, tuple[int, int]] = {"eager": (45, 80), "fused": (28, 50), "compiled": (16, 30)}
"""Kernels of a block, forward and backward."""
_PASSES: dict[Kernels, tuple[int, int, int]] = {
    "eager": (38, 14, 5),
    "fused": (10, 4, 5),
    "compiled": (8, 2, 3),
}
"""Numbers that a block's forward reads and writes for a token: for each of its width, of its queries and
keys, and of its feed-forward width. Eager norms and rotations go to float32 and back step by step."""
_PAIRS_BACK = 2.5 * 73 / 63
"""Attention's backward over its forward: 5/2 of the FLOP, at 63% of the peak where the forward has 73%."""
_LOGIT_BYTES = 10
"""Passes of a fused cross entropy over a logit: written, read, gradient written and read, in 2 to 4 bytes."""
_CAST_BYTES = 5
"""Of an input of an 8-bit product: read for its scale, read again, written."""
_CODEC_BYTES = 24
"""Of a number on its way to 8 bits and back: largest of its block, scaled, rounded, clamped, cast; as eager
operators do it."""


class Seconds(NamedTuple):
    """Of one micro-batch on one rank."""

    forward: float
    backward: float
    """Without what is computed again."""
    again: float
    """What the cheap operators of the forward take, without products and attention."""


def speed(job: Job, device: Device, constants: Constants, *, plain: bool = False) -> float:
    """Return FLOP a second of endless products: in the type of `linear`, or plain in that of `compute`."""
    peak = constants.sustained[device.architecture] * _peak(job, device)
    if job.linear == "compute" or plain:
        return peak
    slower = ROWWISE if job.linear == "float8_rowwise" else 1.0
    return peak * slower * device.float8_tflops / device.bfloat16_tflops


def attention_speed(job: Job, device: Device) -> float:
    """Return FLOP a second of flash attention."""
    return ATTENTION[device.architecture] * _peak(job, device)


def _peak(job: Job, device: Device) -> float:
    """Return FLOP a second of the type of `compute`, at the clock that the device's power allows."""
    peak = device.float32_tflops if job.compute == "float32" else device.bfloat16_tflops
    clock: float = device.power_share ** (1 / 3)  # power grows with clock x voltage squared
    return 1e12 * peak * clock


def block_seconds(job: Job, device: Device, constants: Constants) -> Seconds:
    """Return what one block takes on one rank."""
    tokens, tensor = job.rank_tokens, job.layout.tensor
    forward, backward = products(job, _matrices(job), device, constants)
    pairs = attention_flops(job) * tokens / tensor / attention_speed(job, device)
    moved = block_passes(job) * tokens / tensor / _memory(device, constants)
    gaps, gaps_back = (n * (GAP_S if device.architecture != "cpu" else 0) for n in _KERNELS[job.kernels])
    host, host_back = (n * device.launch_us / 1e6 for n in _KERNELS[job.kernels])
    return Seconds(
        max(forward + pairs + moved + gaps, host),
        max(backward + _PAIRS_BACK * pairs + 2 * moved + gaps_back, host_back),
        max(moved + gaps, host / 2),
    )


def products(
    job: Job,
    matrices: list[tuple[float, float]],
    device: Device,
    constants: Constants,
    *,
    plain: bool = False,
) -> tuple[float, float]:
    """Return seconds of the products with some matrices, forward and backward.

    Args:
        matrices: rows (terms of the forward's sums) and columns of each, on one rank.
        plain: in the type of `compute`, whatever `linear` says.
    """
    tokens, rate = job.rank_tokens, speed(job, device, constants, plain=plain)
    fill = constants.fill * rate / speed(job, device, constants, plain=True)
    forward = sum(n * (k + fill) for k, n in matrices) * tokens
    inputs = sum(k * (n + fill) for k, n in matrices) * tokens
    weights = sum(k * n for k, n in matrices) * (tokens + fill)
    return 2 * forward / rate, 2 * (inputs + weights) / rate


def _matrices(job: Job) -> list[tuple[float, float]]:
    model, tensor = job.model, job.layout.tensor
    hidden, wide = model.hidden_size, model.intermediate_size / tensor
    heads = model.num_attention_heads * model.size_of_head / tensor
    keys = model.key_value_heads * model.size_of_head / tensor
    return [(hidden, heads + 2 * keys), (heads, hidden), (hidden, 2 * wide), (wide, hidden)]


def head_seconds(job: Job, device: Device, constants: Constants) -> Seconds:
    """Return what the output matrix and the loss take on one rank; the embedding is looked up."""
    tokens, model = job.rank_tokens, job.model
    rows = model.vocab_size / job.layout.tensor
    forward, backward = products(job, [(model.hidden_size, rows)], device, constants, plain=True)
    passes = 1.0 if job.kernels == "compiled" else 2.5
    moved = _LOGIT_BYTES * rows * tokens * passes / _memory(device, constants)
    return Seconds(forward + moved / 2, backward + moved / 2, 0.0)


def update_seconds(job: Job, device: Device, constants: Constants) -> float:
    """Return what the optimizer's step takes: each byte of its state read and written once."""
    parameters = job.model.num_parameters / job.layout.pipeline / job.layout.tensor / job.shard_ranks
    return 2 * job.state_bytes * parameters / _memory(device, constants)


def attention_flops(job: Job) -> float:
    """Return FLOP of a block's attention for one token, forward, over all heads and all that it sees."""
    model, length = job.model, job.sequence_length
    keys = sum(_seen(length, window) for window in model.windows) / model.num_hidden_layers
    if job.layout.context > 1 and job.context_rule == "all_gather" and not job.context_balanced:
        keys = length  # by a mask, and the rank of the last stretch sees everything
    return 4 * model.num_attention_heads * model.size_of_head * keys


def _seen(length: int, window: int | None) -> float:
    """Return how many tokens one sees on average."""
    if window is None or window >= length:
        return length / 2
    return window - window**2 / (2 * length)


def block_passes(job: Job) -> float:
    """Return bytes that a block's forward moves for one token outside of its products and its attention."""
    model, size = job.model, job.compute_bytes
    hidden, wide = model.hidden_size, model.intermediate_size
    heads = model.num_attention_heads * model.size_of_head
    keys = model.key_value_heads * model.size_of_head
    by_hidden, by_heads, by_wide = _PASSES[job.kernels]
    moved = float(size * (by_hidden * hidden + by_heads * (heads + keys) + by_wide * wide))
    if job.linear != "compute":
        whole = job.layout.tensor if job.linear == "float8_rowwise" else 1  # cast after they are gathered
        moved += _CAST_BYTES * (2 * hidden * whole + heads + wide)
    if job.attention == "plain":
        moved += 6 * size * model.num_attention_heads * job.sequence_length
    return moved


def again_seconds(seconds: Seconds, mode: Mode) -> float:
    """Return what a block computes a second time in its backward."""
    return {"keep": 0.0, "operators": seconds.again, "full": seconds.forward}[mode]


def coding_seconds(numbers: float, device: Device, constants: Constants) -> float:
    """Return what an 8-bit codec takes to write numbers, or to read them."""
    return _CODEC_BYTES * numbers / _memory(device, constants)


def _memory(device: Device, constants: Constants) -> float:
    return constants.memory * device.memory_gb_s * 1e9

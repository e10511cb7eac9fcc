"""How long a device computes: products at a share of its peak, everything else at the speed of its memory.

A block's time is the sum of three: matrix products (2 FLOP a parameter and token forward, 4 backward), causal
attention (half of all pairs; its backward is 5/2 of its forward, Dao, arXiv:2307.08691), and passes over
memory by norms, rotations, gates and residual sums, counted in bytes a token. Eager kernels make several
passes where a compiled one makes one. No kernel starts faster than the host can ask for it.
"""

from typing import NamedTuple

from penstock.parallel.recompute_plan import Mode
from penstock.plan.constants import MEMORY_SHARE, Constants
from penstock.plan.hardware import Device
from penstock.plan.job import Job

_KERNELS = {False: (45, 80), True: (16, 30)}
"""Kernels of a block, forward and backward, eager and compiled: counted in traces of a Llama block."""
_LOGIT_BYTES = 10
"""Passes of a fused cross entropy over a logit: written, read, gradient written and read, in 2 to 4 bytes."""
_CAST_BYTES = 5
"""Of an input of an 8-bit product: read for its scale, read again, written."""


class Seconds(NamedTuple):
    """Of one micro-batch on one rank."""

    forward: float
    backward: float
    """Without what is computed again."""
    again: float
    """What the cheap operators of the forward take, without products and attention."""


def speed(job: Job, device: Device, constants: Constants, *, products: bool = True) -> float:
    """Return FLOP a second of large products: of linear layers, or of attention, which stays in `compute`."""
    peak = device.float32_tflops if job.compute == "float32" else device.bfloat16_tflops
    if products and job.linear != "compute" and device.float8_tflops:
        peak = device.float8_tflops
    clock: float = device.power_share ** (1 / 3)  # power grows with clock x voltage squared
    share = constants.sustained[device.architecture]
    return 1e12 * peak * share * clock * (1.0 if products else constants.attention)


def block_seconds(job: Job, device: Device, constants: Constants) -> Seconds:
    """Return what one block takes on one rank."""
    tokens, tensor = job.rank_tokens, job.layout.tensor
    products = 2 * job.block_parameters * tokens / tensor / speed(job, device, constants)
    pairs = attention_flops(job) * tokens / tensor / speed(job, device, constants, products=False)
    moved = block_passes(job, constants) * tokens / tensor / _memory(device)
    forward, backward = (n * device.launch_us / 1e6 for n in _KERNELS[job.compiled])
    return Seconds(
        max(products + pairs + moved, forward),
        max(2 * products + 2.5 * pairs + 2 * moved, backward),
        max(moved, forward / 2),
    )


def head_seconds(job: Job, device: Device, constants: Constants) -> Seconds:
    """Return what the output matrix and the loss take on one rank; the embedding is looked up."""
    tokens, model = job.rank_tokens, job.model
    rows = model.vocab_size / job.layout.tensor
    peak = speed(job, device, constants) if job.linear == "compute" else _plain(job, device, constants)
    products = 2 * rows * model.hidden_size * tokens / peak
    passes = 1.0 if job.compiled else constants.eager_passes
    moved = _LOGIT_BYTES * rows * tokens * passes / _memory(device)
    return Seconds(products + moved / 2, 2 * products + moved / 2, 0.0)


def update_seconds(job: Job, device: Device) -> float:
    """Return what the optimizer's step takes: each byte of its state read and written once."""
    parameters = job.model.num_parameters / job.layout.pipeline / job.layout.tensor / job.shard_ranks
    return 2 * job.state_bytes * parameters / _memory(device)


def attention_flops(job: Job) -> float:
    """Return FLOP of a block's attention for one token, forward, over all heads: half of the row's pairs."""
    model, length = job.model, job.sequence_length
    keys = sum(_seen(length, window) for window in model.windows) / model.num_hidden_layers
    return 4 * model.num_attention_heads * model.size_of_head * keys


def _seen(length: int, window: int | None) -> float:
    """Return how many tokens one sees on average."""
    if window is None or window >= length:
        return length / 2
    return window - window**2 / (2 * length)


def block_passes(job: Job, constants: Constants) -> float:
    """Return bytes that a block's forward moves for one token outside of its products and its attention."""
    model, size = job.model, job.compute_bytes
    hidden, wide = model.hidden_size, model.intermediate_size
    heads = model.num_attention_heads * model.size_of_head
    keys = model.key_value_heads * model.size_of_head
    once = size * (8 * hidden + 2 * (heads + keys) + 3 * wide)
    moved = once if job.compiled else constants.eager_passes * once
    if job.linear != "compute":
        moved += _CAST_BYTES * (2 * hidden + heads + wide)
    if job.attention == "plain":
        moved += 6 * size * model.num_attention_heads * job.sequence_length
    return moved


def again_seconds(seconds: Seconds, mode: Mode) -> float:
    """Return what a block computes a second time in its backward."""
    return {"keep": 0.0, "operators": seconds.again, "full": seconds.forward}[mode]


def _plain(job: Job, device: Device, constants: Constants) -> float:
    return speed(job, device, constants, products=False) / constants.attention


def _memory(device: Device) -> float:
    return MEMORY_SHARE * device.memory_gb_s * 1e9

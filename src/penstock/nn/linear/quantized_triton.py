"""Products of few tokens and an int8 or int4 matrix in Triton, for GPUs; the matrix is never expanded in
memory.

Such a product takes the time of reading its matrix. A program has some outputs and all tokens (at most
`MAX_TOKENS` of quantized.py), converts codes to the tokens' dtype in registers, and multiplies.

They are tested in Triton's interpreter and compiled for GPU types without running; tests/gpu runs them, which
an H100 passed (benchmarks/results/gpu-2026-11-26.json).
"""

import triton
import triton.language as tl
from jaxtyping import BFloat16, Float, Int8, UInt8
from torch import Tensor

_OUTPUTS = 32
_INPUTS = 128


def linear_int8(
    x: Float[Tensor, "t inputs"], codes: Int8[Tensor, "outputs inputs"], scales: Float[Tensor, "outputs"]
) -> Float[Tensor, "t outputs"]:
    """Return x times the matrix of codes and scales."""
    out, tokens = x.new_empty(len(x), len(codes)), _padded(len(x))
    _multiply_int8[(triton.cdiv(len(codes), _OUTPUTS),)](
        x.contiguous(), codes, scales, out, len(x), codes.shape[0], codes.shape[1],
        TOKENS=tokens, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS,
    )  # fmt: skip
    return out


def linear_int4(
    x: Float[Tensor, "t inputs"],
    codes: UInt8[Tensor, "outputs half_inputs"],
    scales: BFloat16[Tensor, "outputs groups"],
) -> Float[Tensor, "t outputs"]:
    """Return x times the matrix of codes and scales: two codes a byte, the first in the lower half."""
    out, tokens = x.new_empty(len(x), len(codes)), _padded(len(x))
    half = codes.shape[1]
    _multiply_int4[(triton.cdiv(len(codes), _OUTPUTS),)](
        x.contiguous(), codes, scales, out, len(x), codes.shape[0], half,
        GROUP=half // scales.shape[1], TOKENS=tokens, OUTPUTS=_OUTPUTS, HALF=_INPUTS // 2,
    )  # fmt: skip
    return out


def _padded(num_tokens: int) -> int:
    return max(16, int(triton.next_power_of_2(num_tokens)))


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_int8(
    x, codes, scales, out, num_tokens, num_outputs, num_inputs,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    token, output = tl.arange(0, TOKENS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    sums = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        i = first + tl.arange(0, INPUTS)
        is_input = i < num_inputs
        x_ti = tl.load(
            x + token[:, None] * num_inputs + i[None, :],
            mask=is_token[:, None] & is_input[None, :],
            other=0.0,
        )
        at = output.to(tl.int64)[None, :] * num_inputs + i[:, None]
        codes_io = tl.load(codes + at, mask=is_output[None, :] & is_input[:, None], other=0)
        sums += tl.dot(x_ti, codes_io.to(x_ti.dtype), input_precision="tf32x3")
    sums *= tl.load(scales + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at = out + token[:, None] * num_outputs + output[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_int4(
    x, codes, scales, out, num_tokens, num_outputs, half_inputs,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """GROUP: bytes of codes that share a scale. Even and odd inputs are two products, which are added."""
    token, output = tl.arange(0, TOKENS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    row = output.to(tl.int64)
    sums = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
    for first in range(0, half_inputs, HALF):
        i = first + tl.arange(0, HALF)
        is_input = i < half_inputs
        here = is_token[:, None] & is_input[None, :]
        even = x + (token[:, None] * half_inputs + i[None, :]) * 2
        there = is_output[None, :] & is_input[:, None]
        both = tl.load(codes + row[None, :] * half_inputs + i[:, None], mask=there, other=0)
        group = row[None, :] * (half_inputs // GROUP) + (i // GROUP)[:, None]
        scale = tl.load(scales + group, mask=there, other=0.0).to(tl.float32)
        for odd in tl.static_range(2):
            code = (both >> 4) if odd else (both & 15)
            numbers = ((code.to(tl.float32) - 8.0) * scale).to(x.dtype.element_ty)
            sums += tl.dot(tl.load(even + odd, mask=here, other=0.0), numbers, input_precision="tf32x3")
    at = out + token[:, None] * num_outputs + output[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])

"""Products of few tokens and an int8 or int4 matrix in Triton, for GPUs; the matrix is never expanded in
memory. For many tokens an int4 matrix is written out, in one pass over its codes.

Such a product takes the time of reading its matrix. A program has some outputs and all tokens (at
most 64), converts codes to the tokens' dtype in registers, and multiplies. The matrix is
the left factor, which tensor cores take from registers. A code becomes a float by writing it into the last
bits of a large one, because GPUs convert integers at a quarter of the speed of additions.

They are tested in Triton's interpreter and compiled for GPU types without running; tests/gpu runs them.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float, Int8, UInt8
from torch import Tensor

_PROGRAMS = 128
"""Programs that fill a GPU."""
_BYTES = 1024
"""Bytes of codes that a program writes out."""


def linear_int8(
    x: Float[Tensor, "t inputs"], codes: Int8[Tensor, "outputs inputs"], scales: Float[Tensor, "outputs"]
) -> Float[Tensor, "t outputs"]:
    """Return x times the matrix of codes and scales."""
    out, (outputs, inputs, tokens, stages) = x.new_empty(len(x), len(codes)), _tile(len(x), len(codes))
    _multiply_int8[(triton.cdiv(len(codes), outputs),)](
        x.contiguous(), codes.view(torch.uint8), scales, out, len(x), codes.shape[0], codes.shape[1],
        TOKENS=tokens, OUTPUTS=outputs, INPUTS=inputs, num_stages=stages,
    )  # fmt: skip
    return out


def linear_int4(
    x: Float[Tensor, "t inputs"],
    codes: UInt8[Tensor, "outputs half_inputs"],
    scales: BFloat16[Tensor, "outputs groups"],
) -> Float[Tensor, "t outputs"]:
    """Return x times the matrix of codes and scales; two codes a byte, stored by `rounding.to_halves`."""
    out, (outputs, inputs, tokens, stages) = x.new_empty(len(x), len(codes)), _tile(len(x), len(codes))
    half, groups = codes.shape[1], scales.shape[1]
    _multiply_int4[(triton.cdiv(len(codes), outputs),)](
        x.contiguous(), codes, scales, out, len(x), codes.shape[0], groups,
        HALF=half // groups, TOKENS=tokens, OUTPUTS=outputs, GROUPS=inputs * groups // (2 * half),
        num_stages=stages,
    )  # fmt: skip
    return out


def written_out_int4(
    codes: UInt8[Tensor, "outputs half_inputs"],
    scales: BFloat16[Tensor, "outputs groups"],
    *,
    inputs: int,
    dtype: torch.dtype,
) -> Float[Tensor, "outputs inputs"]:
    """Return the matrix of codes and scales; two codes a byte, stored by `rounding.to_halves`."""
    out = codes.new_empty(len(codes), inputs, dtype=dtype)
    half, groups = codes.shape[1], scales.shape[1]
    _write_out_int4[(len(codes), triton.cdiv(half, _BYTES))](
        codes, scales, out, half, groups, inputs, HALF=half // groups, BYTES=_BYTES
    )
    return out


def _tile(num_tokens: int, num_outputs: int) -> tuple[int, int, int, int]:
    """Return a program's outputs, its inputs and tokens of a turn, and the turns whose reads are in flight.

    A small matrix and few tokens have programs with fewer outputs, so that they fill the GPU.
    """
    tokens = max(16, int(triton.next_power_of_2(num_tokens)))
    if tokens > 16:
        return 64, 128, tokens, 3
    return (64, 128, tokens, 4) if num_outputs >= 64 * _PROGRAMS else (32, 256, tokens, 4)


@triton.jit
def _floats(codes, ZERO: tl.constexpr):
    """Return uint8 codes minus ZERO in float32: 2^23 + code has the code in its last bits."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_int8(
    x, codes, scales, out, num_tokens, num_outputs, num_inputs,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    token, output = tl.arange(0, TOKENS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    row = output.to(tl.int64)[:, None] * num_inputs
    sums = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        i = first + tl.arange(0, INPUTS)
        is_input = i < num_inputs
        here = is_input[:, None] & is_token[None, :]
        x_it = tl.load(x + token[None, :] * num_inputs + i[:, None], mask=here, other=0.0)
        code = tl.load(codes + row + i[None, :], mask=is_output[:, None] & is_input[None, :], other=0)
        numbers = _floats(code ^ 128, 128).to(x_it.dtype)  # of two's complement, from 0 to 255
        sums += tl.dot(numbers, x_it, input_precision="tf32x3")
    sums *= tl.load(scales + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = out + token[None, :] * num_outputs + output[:, None]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_int4(
    x, codes, scales, out, num_tokens, num_outputs, num_groups,
    HALF: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """HALF: bytes of a group. The halves of groups are two products, which are added."""
    token, output = tl.arange(0, TOKENS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    row, byte = output.to(tl.int64)[:, None] * num_groups, tl.arange(0, HALF)
    column = tl.arange(0, GROUPS * HALF)
    input_of_column = column // HALF * (2 * HALF) + column % HALF
    sums = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
    for first in range(0, num_groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        there = is_output[:, None] & (group < num_groups)[None, :]
        at = (row + group[None, :])[:, :, None] * HALF + byte[None, None, :]
        both = tl.load(codes + at, mask=there[:, :, None], other=0)
        scale = tl.load(scales + row + group[None, :], mask=there, other=0.0).to(tl.float32)[:, :, None]
        here = (first + column // HALF < num_groups)[:, None] & is_token[None, :]
        of_token = (
            x + token[None, :] * (num_groups * 2 * HALF) + first * (2 * HALF) + input_of_column[:, None]
        )
        for half in tl.static_range(2):
            code = (both >> 4) if half else (both & 15)
            numbers = (_floats(code, 8) * scale).to(x.dtype.element_ty)
            x_it = tl.load(of_token + half * HALF, mask=here, other=0.0)
            sums += tl.dot(tl.reshape(numbers, [OUTPUTS, GROUPS * HALF]), x_it, input_precision="tf32x3")
    at = out + token[None, :] * num_outputs + output[:, None]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


@triton.jit
def _write_out_int4(
    codes, scales, out, num_bytes, num_groups, num_inputs, HALF: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """HALF: bytes of a group. A program writes a part of a row."""
    row, byte = tl.program_id(0).to(tl.int64), tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    both = tl.load(codes + row * num_bytes + byte, mask=byte < num_bytes, other=0)
    group = byte // HALF
    scale = tl.load(scales + row * num_groups + group, mask=group < num_groups, other=0.0).to(tl.float32)
    column = group * (2 * HALF) + byte % HALF
    for half in tl.static_range(2):
        code = (both >> 4) if half else (both & 15)
        numbers = (_floats(code, 8) * scale).to(out.dtype.element_ty)
        here = column + half * HALF
        tl.store(out + row * num_inputs + here, numbers, mask=here < num_inputs)

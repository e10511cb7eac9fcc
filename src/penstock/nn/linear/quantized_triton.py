"""Products of few tokens and an int8 or int4 matrix in Triton, for GPUs; the matrix is never expanded in
memory. For many tokens an int4 matrix is written out, in one pass over its codes.

Such a product takes the time of reading its matrix if widening codes to the tokens' dtype takes less. An H200
reads a code of 4 bits in the time of four instructions, so codes are widened to bfloat16, in which models
serve, by two instructions each, in PTX:

    byte   0000cccc             a code, alone in its byte
    prmt   0x43 0000cccc        two bytes a number: 128 + code, exactly; one instruction makes two numbers
    fma    x 1 - 136            code - 8, exactly; two numbers at a time
    fma    x scale              the only rounding

The lower 7 bits of an int8 code make 128 + bits, and its sign makes the 128 or 256 that is subtracted. Other
dtypes write a code into the last bits of a large float32.

With up to 16 tokens the matrix is the left factor of a product of tiles, and tensor cores take it from
registers. With more tokens the tokens are the left factor, and numbers go through shared memory: so a thread
widens 16 neighbouring bytes, and tokens are read in whole rows.

They are tested in Triton's interpreter, which knows no PTX, and compiled for GPU types without running;
tests/gpu runs them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float, Int8, UInt8
from torch import Tensor

from penstock.nn.linear.adapter_config import GROUP

_PROGRAMS = 128
"""Programs that fill a GPU."""
_BYTES = 1024
"""Bytes of codes that a program writes out."""
_MAX_FROM_REGISTERS = 16
"""Tokens up to which the matrix is the left factor."""


class Tile(NamedTuple):
    """Tile of one program of a product, and how it is computed."""

    tokens: int
    outputs: int
    inputs: int
    """Of a turn."""
    warps: int
    stages: int
    """Turns whose reads are in flight."""


def linear_int8(
    x: Float[Tensor, "t inputs"], codes: Int8[Tensor, "outputs inputs"], scales: Float[Tensor, "outputs"]
) -> Float[Tensor, "t outputs"]:
    """Return x times the matrix of codes and scales."""
    (num_outputs, num_inputs), tile = codes.shape, tile_of(len(x), len(codes), x.dtype, bits=8)
    out = x.new_empty(len(x), num_outputs)
    kernel = _few_int8 if tile.tokens <= _MAX_FROM_REGISTERS else _many_int8
    kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x.contiguous(), codes.view(torch.uint8), scales, out, len(x), num_outputs, num_inputs,
        TOKENS=tile.tokens, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        IS_WHOLE=num_inputs % tile.inputs == 0, IN_PAIRS=in_pairs(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def linear_int4(
    x: Float[Tensor, "t inputs"],
    codes: UInt8[Tensor, "outputs half_inputs"],
    scales: BFloat16[Tensor, "outputs groups"],
) -> Float[Tensor, "t outputs"]:
    """Return x times the matrix of codes and scales; two codes a byte, stored by `rounding.to_halves`."""
    (num_outputs, num_groups), tile = scales.shape, tile_of(len(x), len(codes), x.dtype, bits=4)
    out = x.new_empty(len(x), num_outputs)
    kernel = _few_int4 if tile.tokens <= _MAX_FROM_REGISTERS else _many_int4
    kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x.contiguous(), codes, scales, out, len(x), num_outputs, num_groups,
        HALF=GROUP // 2, TOKENS=tile.tokens, OUTPUTS=tile.outputs, GROUPS=tile.inputs // GROUP,
        IS_WHOLE=num_groups * GROUP % tile.inputs == 0, IN_PAIRS=in_pairs(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
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


def in_pairs(dtype: torch.dtype) -> bool:
    """Return True if codes are widened by PTX, which Triton's interpreter does not know."""
    return dtype == torch.bfloat16 and not triton.knobs.runtime.interpret


def tile_of(num_tokens: int, num_outputs: int, dtype: torch.dtype, *, bits: int) -> Tile:
    """Return the tile of a product. Programs of smaller matrices have fewer outputs, so that they fill a GPU.

    >>> tile_of(1, 28672, torch.bfloat16, bits=4)
    Tile(tokens=8, outputs=32, inputs=256, warps=2, stages=4)
    """
    tokens = max(8, int(triton.next_power_of_2(num_tokens)))
    is_wide = dtype.itemsize > 2
    if tokens <= _MAX_FROM_REGISTERS:
        return Tile(16, 32, 64, 2, 3) if is_wide else Tile(tokens, 32, 256, 2, 4)
    if is_wide:
        return Tile(tokens, 32, 64, 4, 2)
    outputs = next((size for size in (128, 64) if num_outputs >= size * _PROGRAMS), 32)
    return Tile(64, outputs, 128, 4, 2 if outputs * bits > 512 else 3)


def _ptx(*lines: str) -> tl.constexpr:
    return tl.constexpr("\n".join(["{", ".reg .b32 low, high, one, less, none;", *lines, "}"]))


_WIDEN_INT4 = _ptx(
    "mov.b32 one, 0x3F803F80;",  # twice 1 in bfloat16
    "mov.b32 less, 0xC308C308;",  # -136
    "mov.b32 none, 0x80008000;",  # -0
    "and.b32 low, $4, 0x0F0F0F0F;",
    "shr.u32 high, $4, 4;",
    "and.b32 high, high, 0x0F0F0F0F;",
    *(
        line
        for out, codes, two, scale in (
            ("$0", "low", "0x4140", "$5"),
            ("$1", "low", "0x4342", "$6"),
            ("$2", "high", "0x4140", "$5"),
            ("$3", "high", "0x4342", "$6"),
        )
        for line in (
            f"prmt.b32 {out}, {codes}, 0x43, {two};",
            f"fma.rn.bf16x2 {out}, {out}, one, less;",
            f"fma.rn.bf16x2 {out}, {out}, {scale}, none;",
        )
    ),
)
"""Four bytes of two codes, and their scales -> the numbers of the lower halves, and of the upper."""
_WIDEN_INT8 = _ptx(
    "mov.b32 less, 0xBF80BF80;",  # twice -1 in bfloat16
    *(
        line
        for out, two in (("$0", "0x4140"), ("$1", "0x4342"))
        for line in (
            f"prmt.b32 {out}, $2, 0x43, {two};",
            f"and.b32 low, {out}, 0xFF7FFF7F;",
            f"and.b32 high, {out}, 0xFF80FF80;",
            f"fma.rn.bf16x2 {out}, high, less, low;",
        )
    ),
)
"""Four bytes -> their numbers."""


@triton.jit
def _floats(codes, ZERO: tl.constexpr):
    """Return uint8 codes minus ZERO in float32: 2^23 + code has the code in its last bits."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _numbers_of_int4(both, scale, dtype: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Return the numbers of the lower halves of bytes, and of the upper ones, times their scales."""
    if IN_PAIRS:
        low, high = tl.inline_asm_elementwise(
            _WIDEN_INT4, "=&r,=&r,=&r,=&r,r,r,r", [both, scale],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (_floats(both & 15, 8) * scale.to(tl.float32)).to(dtype)
        high = (_floats(both >> 4, 8) * scale.to(tl.float32)).to(dtype)
    return low, high


@triton.jit
def _numbers_of_int8(codes, dtype: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Return the numbers of bytes in two's complement."""
    if IN_PAIRS:
        numbers = tl.inline_asm_elementwise(
            _WIDEN_INT8, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        numbers = _floats(codes ^ 128, 128).to(dtype)
    return numbers


@triton.jit
def _of_bytes(scale, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Return the scale of each byte from those of groups."""
    each = tl.broadcast_to(scale[:, :, None], [OUTPUTS, GROUPS, HALF])
    return tl.reshape(each, [OUTPUTS, GROUPS * HALF])


@triton.jit(do_not_specialize=["num_tokens"])
def _few_int8(
    x, codes, scales, out, num_tokens, num_outputs, num_inputs,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    token, output = tl.arange(0, TOKENS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    row = output.to(tl.int64)[:, None] * num_inputs
    sums = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        i = first + tl.arange(0, INPUTS)
        is_input = (i < num_inputs) | IS_WHOLE
        here = is_input[:, None] & is_token[None, :]
        x_it = tl.load(x + token[None, :] * num_inputs + i[:, None], mask=here, other=0.0)
        code = tl.load(codes + row + i[None, :], mask=is_output[:, None] & is_input[None, :], other=0)
        numbers = _numbers_of_int8(code, x_it.dtype, IN_PAIRS)
        sums = tl.dot(numbers, x_it, sums, input_precision="tf32x3")
    sums *= tl.load(scales + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = out + token[None, :] * num_outputs + output[:, None]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _many_int8(
    x, codes, scales, out, num_tokens, num_outputs, num_inputs,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    token, output = tl.arange(0, TOKENS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    row = output.to(tl.int64)[:, None] * num_inputs
    sums = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        i = first + tl.arange(0, INPUTS)
        is_input = (i < num_inputs) | IS_WHOLE
        here = is_token[:, None] & is_input[None, :]
        x_ti = tl.load(x + token[:, None] * num_inputs + i[None, :], mask=here, other=0.0)
        code = tl.load(codes + row + i[None, :], mask=is_output[:, None] & is_input[None, :], other=0)
        numbers = _numbers_of_int8(code, x_ti.dtype, IN_PAIRS)
        sums = tl.dot(x_ti, tl.trans(numbers), sums, input_precision="tf32x3")
    sums *= tl.load(scales + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at = out + token[:, None] * num_outputs + output[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _few_int4(
    x, codes, scales, out, num_tokens, num_outputs, num_groups,
    HALF: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
    IS_WHOLE: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """HALF: bytes of a group. The halves of groups are two products, which are added."""
    token, output = tl.arange(0, TOKENS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    row, byte = output.to(tl.int64)[:, None] * num_groups, tl.arange(0, GROUPS * HALF)
    input_of_byte = byte // HALF * (2 * HALF) + byte % HALF
    sums = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
    for first in range(0, num_groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        is_group = (group < num_groups) | IS_WHOLE
        is_byte = (byte < (num_groups - first) * HALF) | IS_WHOLE
        at = codes + (row + first) * HALF + byte[None, :]
        both = tl.load(at, mask=is_output[:, None] & is_byte[None, :], other=0)
        there = is_output[:, None] & is_group[None, :]
        scale = tl.load(scales + row + group[None, :], mask=there, other=0.0)
        scale = _of_bytes(scale, OUTPUTS, GROUPS, HALF)
        low, high = _numbers_of_int4(both, scale, x.dtype.element_ty, IN_PAIRS)
        here = is_byte[:, None] & is_token[None, :]
        of_token = x + token[None, :] * (num_groups * 2 * HALF) + first * (2 * HALF) + input_of_byte[:, None]
        x_it = tl.load(of_token, mask=here, other=0.0)
        sums = tl.dot(low, x_it, sums, input_precision="tf32x3")
        x_it = tl.load(of_token + HALF, mask=here, other=0.0)
        sums = tl.dot(high, x_it, sums, input_precision="tf32x3")
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


@triton.jit(do_not_specialize=["num_tokens"])
def _many_int4(
    x, codes, scales, out, num_tokens, num_outputs, num_groups,
    HALF: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
    IS_WHOLE: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """HALF: bytes of a group."""
    token, output = tl.arange(0, TOKENS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    row, byte = output.to(tl.int64)[:, None] * num_groups, tl.arange(0, GROUPS * HALF)
    i = tl.arange(0, GROUPS * 2 * HALF)
    sums = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
    for first in range(0, num_groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        is_group = (group < num_groups) | IS_WHOLE
        is_byte = (byte < (num_groups - first) * HALF) | IS_WHOLE
        is_input = (i < (num_groups - first) * (2 * HALF)) | IS_WHOLE
        at = codes + (row + first) * HALF + byte[None, :]
        both = tl.load(at, mask=is_output[:, None] & is_byte[None, :], other=0)
        there = is_output[:, None] & is_group[None, :]
        scale = tl.load(scales + row + group[None, :], mask=there, other=0.0)
        scale = _of_bytes(scale, OUTPUTS, GROUPS, HALF)
        low, high = _numbers_of_int4(both, scale, x.dtype.element_ty, IN_PAIRS)
        low = tl.reshape(low, [OUTPUTS, GROUPS, HALF])
        high = tl.reshape(high, [OUTPUTS, GROUPS, HALF])
        numbers = tl.trans(tl.join(low, high), 0, 1, 3, 2)  # in the order of inputs
        numbers = tl.reshape(numbers, [OUTPUTS, GROUPS * 2 * HALF])
        here = is_token[:, None] & is_input[None, :]
        of_token = x + token[:, None] * (num_groups * 2 * HALF) + first * (2 * HALF) + i[None, :]
        x_ti = tl.load(of_token, mask=here, other=0.0)
        sums = tl.dot(x_ti, tl.trans(numbers), sums, input_precision="tf32x3")
    at = out + token[:, None] * num_outputs + output[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])

"""Numbers in fewer bits for the wire: bfloat16 and, with a scale a block, float8, int8 and int4; pure.

A block of neighbours is divided by a scale that brings its largest number to the largest code, and rounded to
the nearest code. So an error is at most half a step of its block, and a block that holds a number that is not
finite comes back as numbers that are all not finite: its scale is not. Who looks for such gradients after a
reduction finds them. Scales travel in front of the codes, in the same tensor and the same collective.

Rounding is to nearest. Where errors would add up over steps, who sends keeps them and adds them to what is
sent next (error feedback), which takes no random numbers and loses less than rounding at random does.

A CPU does this at memory's speed only in whole passes of vector instructions; hence two reductions for a
largest number (a norm, or `abs` first, is slower), and shifts for float8, which torch converts one by one.
Method: Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv:2110.02861.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torch.nn import functional

from penstock.parallel.encoded_size import BLOCK, SCALE_BYTES, CodecName, encoded_bytes

_SMALLEST = torch.finfo(torch.float32).tiny  # of a scale: its inverse is still finite


def encode(x: Tensor, codec: CodecName) -> UInt8[Tensor, "*rows bytes"]:
    """Return the numbers of each row, [..., size] of any float type, in `encoded_bytes(size)` bytes.

    float32 is not copied, neither here nor there.
    """
    rows, size = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        return x.new_empty((*rows, encoded_bytes(size, codec)), dtype=torch.uint8)
    x = x.contiguous()
    if codec in _PLAIN:
        return x.to(_PLAIN[codec]).view(torch.uint8)
    blocks = _blocks(x.float())
    kind = _BLOCKWISE[codec]
    scales = (_largest(blocks) / kind.largest).clamp_min(_SMALLEST)
    codes = kind.pack(blocks * scales.reciprocal())
    return torch.cat([part.reshape(*rows, -1) for part in (scales.view(torch.uint8), codes)], dim=-1)


def decode(
    encoded: UInt8[Tensor, "*rows bytes"], codec: CodecName, *, size: int
) -> Float32[Tensor, "*rows n"]:
    """Return the float32 numbers of each row that were encoded, `size` of them."""
    assert encoded.shape[-1] == encoded_bytes(size, codec), (encoded.shape, codec, size)
    if encoded.numel() == 0:
        return encoded.new_empty((*encoded.shape[:-1], size), dtype=torch.float32)
    if codec in _PLAIN:
        return encoded.contiguous().view(_PLAIN[codec]).float()
    rows, num_blocks = encoded.shape[:-1], -(-size // BLOCK)
    scales, codes = encoded.tensor_split([SCALE_BYTES * num_blocks], dim=-1)
    numbers = _BLOCKWISE[codec].unpack(codes.reshape(*rows, num_blocks, -1))
    numbers.mul_(scales.contiguous().view(torch.float32).unsqueeze(-1))
    return numbers.flatten(-2)[..., :size]


def _blocks(x: Tensor) -> Tensor:
    """Return [..., blocks, BLOCK], the last block of a row filled up with zeros."""
    missing = -x.shape[-1] % BLOCK
    whole = functional.pad(x, (0, missing)) if missing else x
    return whole.view(*x.shape[:-1], whole.shape[-1] // BLOCK, BLOCK)


def _largest(blocks: Tensor) -> Tensor:
    """Return [..., blocks, 1], the largest magnitude of each block; NaN where there is one."""
    return torch.maximum(blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True).neg_())


@dataclass(frozen=True, slots=True)
class _Blockwise:
    """How numbers that were brought into a range become bytes."""

    largest: float
    pack: Callable[[Tensor], Tensor]
    """[..., BLOCK] float32, which it may overwrite -> [..., bytes] uint8."""
    unpack: Callable[[Tensor], Tensor]
    """The way back, to new memory."""


def _pack_int8(x: Tensor) -> Tensor:
    return x.round_().to(torch.int8).view(torch.uint8)


def _unpack_int8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8).float()


def _pack_int4(x: Tensor) -> Tensor:
    """Pack number i of a block with number i + BLOCK / 2, so that both are read in vectors."""
    low, high = x.round_().add_(8).to(torch.uint8).chunk(2, dim=-1)
    return high.bitwise_left_shift(4).bitwise_or_(low)


def _unpack_int4(codes: Tensor) -> Tensor:
    both = torch.cat([codes.bitwise_and(15), codes.bitwise_right_shift(4)], dim=-1)
    return both.float().sub_(8)


def _pack_float8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _unpack_float8(codes: Tensor) -> Tensor:
    """Move sign, exponent and mantissa to their places in a float32, and mend the exponent's bias."""
    wide = codes.view(torch.int8).int()  # the sign fills the upper bits
    signs = wide.bitwise_and(-(2**31))
    numbers = wide.bitwise_and_(0x7F).bitwise_left_shift_(20).bitwise_or_(signs).view(torch.float32)
    return numbers.mul_(2.0 ** (127 - 7))


_PLAIN: dict[CodecName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BLOCKWISE: dict[CodecName, _Blockwise] = {
    "float8": _Blockwise(448, _pack_float8, _unpack_float8),
    "int8": _Blockwise(127, _pack_int8, _unpack_int8),
    "int4": _Blockwise(7, _pack_int4, _unpack_int4),
}

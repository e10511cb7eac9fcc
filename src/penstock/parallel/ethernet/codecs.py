"""Codecs for the wire: bfloat16, and block-wise float8, int8 and int4, with error feedback; pure.

A block of 128 numbers is divided by a scale that maps its largest magnitude to the largest code, and rounded
to the nearest code. So an error is at most half a step of its block. A block with a non-finite number decodes
to non-finite numbers only, because its scale is not finite, so a check after the reduction finds it. Scales
are sent before the codes, in the same tensor and the same collective.

Rounding is to nearest. Where errors would accumulate over steps, the sender adds them to what it sends next
(error feedback), which needs no random numbers and loses less than stochastic rounding.

A CPU reaches memory bandwidth only in whole passes of vector instructions; hence two reductions for the
largest magnitude (a norm, or `abs` first, is slower), and shifts for float8, which torch converts one by one.
Method: Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv:2110.02861.

With error feedback, nothing is lost in the sum over steps, by which weights move, except the last error.
Without it, a direction in which every gradient is below half a step of its block never moves. Sources: Seide
et al., "1-bit stochastic gradient descent", Interspeech 2014; convergence: Karimireddy et al., "Error
feedback fixes SignSGD", arXiv:1901.09847.

Errors are at most half a step of their block, so bfloat16 is precise enough. Errors of non-finite numbers are
dropped: such a step is skipped.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn import functional

from penstock.parallel.ethernet.wire_size import BLOCK, SCALE_BYTES, CodecName, encoded_bytes

_SMALLEST = torch.finfo(torch.float32).tiny  # smallest scale whose inverse is finite


def encode(x: Tensor, codec: CodecName) -> UInt8[Tensor, "*rows bytes"]:
    """Encode the numbers of each row, [..., size] of any float dtype, in `encoded_bytes(size)` bytes.

    float32 is a view, not a copy; so in `decode`.
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
    """Decode `size` float32 numbers per row."""
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
    """Return [..., blocks, BLOCK], the last block of a row padded with zeros."""
    missing = -x.shape[-1] % BLOCK
    whole = functional.pad(x, (0, missing)) if missing else x
    return whole.view(*x.shape[:-1], whole.shape[-1] // BLOCK, BLOCK)


def _largest(blocks: Tensor) -> Tensor:
    """Return [..., blocks, 1], the largest magnitude of each block; NaN if it contains one."""
    return torch.maximum(blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True).neg_())


@dataclass(frozen=True, slots=True)
class _Blockwise:
    """Conversion between scaled numbers and bytes."""

    largest: float
    pack: Callable[[Tensor], Tensor]
    """[..., BLOCK] float32, which may be overwritten -> [..., bytes] uint8."""
    unpack: Callable[[Tensor], Tensor]
    """The inverse, to new memory."""


def _pack_int8(x: Tensor) -> Tensor:
    return x.round_().to(torch.int8).view(torch.uint8)


def _unpack_int8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8).float()


def _pack_int4(x: Tensor) -> Tensor:
    """Pack number i of a block with number i + BLOCK / 2, so that both halves are read as vectors."""
    low, high = x.round_().add_(8).to(torch.uint8).chunk(2, dim=-1)
    return high.bitwise_left_shift(4).bitwise_or_(low)


def _unpack_int4(codes: Tensor) -> Tensor:
    both = torch.cat([codes.bitwise_and(15), codes.bitwise_right_shift(4)], dim=-1)
    return both.float().sub_(8)


def _pack_float8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _unpack_float8(codes: Tensor) -> Tensor:
    """Shift sign, exponent and mantissa to their positions in a float32, then correct the exponent's bias."""
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


EVERYTHING = slice(None)


class Encoder:
    """Encodes rows of one shape, with optional error feedback.

    Args:
        feedback: add the rounding error of each number to the next one; two bytes per number.
    """

    def __init__(self, codec: CodecName, *, feedback: bool = False) -> None:
        self.codec: CodecName = codec
        self._has_feedback = feedback and codec != "float32"
        self._left: Tensor | None = None

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of stored rounding errors."""
        return 0 if self._left is None else self._left.nbytes

    def encode(
        self, x: Float[Tensor, "rows n"], columns: slice = EVERYTHING, *, of: int | None = None
    ) -> UInt8[Tensor, "rows bytes"]:
        """Return the encoded rows.

        Args:
            columns: slice of the `of` columns that these are, if rows are sent in pieces.
            of: number of columns of whole rows; None: as many as here.
        """
        if not self._has_feedback:
            return encode(x, self.codec)
        if self._left is None:
            self._left = x.new_zeros((x.shape[0], x.shape[1] if of is None else of), dtype=torch.bfloat16)
        left = self._left[:, columns]
        owed = x + left
        encoded = encode(owed, self.codec)
        owed -= decode(encoded, self.codec, size=owed.shape[1])
        left.copy_(owed.nan_to_num_(0.0, 0.0, 0.0))
        return encoded


@dataclass(frozen=True, slots=True)
class Encoders:
    """Encoders of one unit's gradients, one per direction."""

    codec: CodecName
    shards: Encoder
    """To the ranks that own the shards."""
    copies: Encoder
    """To the replicas of a shard."""
    mean: Encoder
    """The mean of the replicas, back to them."""

    @classmethod
    def of(cls, codec: CodecName, *, feedback: bool) -> "Encoders":
        """Return new encoders of one codec."""
        return cls(codec, *(Encoder(codec, feedback=feedback) for _ in range(3)))

"""Encode the same numbers again and again, and send later what rounding left out: error feedback; pure.

What a codec leaves out of one gradient is kept and added to the next, so that in the sum over steps, which is
what weights move by, nothing is lost but the last remainder. Without it, a direction in which every gradient
is less than half a step of its block never moves. Sources: Seide et al., "1-bit stochastic gradient descent",
Interspeech 2014; that it converges: Karimireddy et al., "Error feedback fixes SignSGD", arXiv:1901.09847.

Remainders are at most half a step of their block, so bfloat16 holds them well enough. Those of numbers that
are not finite are forgotten: such a step is not taken.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from penstock.parallel.codecs import decode, encode
from penstock.parallel.encoded_size import CodecName

EVERYTHING = slice(None)


class Encoder:
    """Encodes rows of one shape.

    Args:
        feedback: keep what rounding leaves out, two bytes a number, and add it to the next.
    """

    def __init__(self, codec: CodecName, *, feedback: bool = False) -> None:
        self.codec: CodecName = codec
        self._has_feedback = feedback and codec != "float32"
        self._left: Tensor | None = None

    @property
    def num_kept_bytes(self) -> int:
        """Of remainders."""
        return 0 if self._left is None else self._left.nbytes

    def encode(
        self, x: Float[Tensor, "rows n"], columns: slice = EVERYTHING, *, of: int | None = None
    ) -> UInt8[Tensor, "rows bytes"]:
        """Return rows to send.

        Args:
            columns: which of `of` columns these are, where rows are sent in pieces.
            of: columns in all; as many as here, if it is not given.
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
    """What encodes the gradients of one unit on each of their ways."""

    codec: CodecName
    shards: Encoder
    """To the ranks that keep the parts."""
    copies: Encoder
    """To the copies of a part."""
    mean: Encoder
    """Of all copies, back to them."""

    @classmethod
    def of(cls, codec: CodecName, *, feedback: bool) -> "Encoders":
        """Return new ones, of one codec."""
        return cls(codec, *(Encoder(codec, feedback=feedback) for _ in range(3)))


PLAIN = Encoders.of("float32", feedback=False)
"""Of gradients that travel as they are."""

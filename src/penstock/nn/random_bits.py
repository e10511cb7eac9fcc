"""64 random bits as a function of an index: `core.rng.mix64` in torch's int64 arithmetic, the same bits."""

from jaxtyping import Int64
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def mix64(values: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Scramble 64-bit integers; the same bits as `core.rng.mix64`, whose source is there."""
    z = values + signed(_GOLDEN)
    z = (z ^ shifted(z, 30)) * signed(_MIX_1)
    z = (z ^ shifted(z, 27)) * signed(_MIX_2)
    return z ^ shifted(z, 31)


def shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right as unsigned integers."""
    # torch shifts signed integers arithmetically; the mask removes the copies of the sign
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number of 64 bits.

    >>> signed(2**64 - 1), signed(7)
    (-1, 7)
    """
    return value - 2**64 if value >= 2**63 else value

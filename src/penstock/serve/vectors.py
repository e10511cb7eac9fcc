"""Vectors as they are sent: cut where the model was trained for it, and as numbers or base64; pure."""

import base64
import math
from array import array
from collections.abc import Sequence
from sys import byteorder

from penstock.serve.errors import ApiError

_FIX = "Leave dimensions out."


def shortened(vector: Sequence[float], length: int | None, *, lengths: Sequence[int] | None) -> list[float]:
    """Return the first numbers of a vector, made of length 1 again.

    Args:
        length: numbers that are wanted; None: all.
        lengths: those that the model was trained for besides the whole (Kusupati et al., arXiv:2205.13147);
            None: any.

    Raises:
        ApiError: the vector is not as long, or would mean nothing.

    >>> shortened([0.6, 0.0, 0.8], 1, lengths=[1])
    [1.0]
    """
    if length is None or length == len(vector):
        return list(vector)
    if length > len(vector):
        said = f"The vectors of this model have {len(vector):,} dimensions (got {length:,})."
        raise ApiError(400, f"{said} {_FIX}", param="dimensions")
    if lengths is not None and length not in lengths:
        said = (
            "The model was not trained for vectors that are cut: its config.json has no is_matryoshka"
            if not lengths
            else f"The model was trained for vectors of {', '.join(map(str, sorted(lengths)))} dimensions"
        )
        raise ApiError(400, f"{said} (got {length:,}). {_FIX}", param="dimensions")
    kept = vector[:length]
    norm = math.hypot(*kept) or 1.0
    return [value / norm for value in kept]


def to_base64(vector: Sequence[float]) -> str:
    """Return little-endian float32 numbers as base64.

    >>> to_base64((1.0,))
    'AACAPw=='
    """
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()

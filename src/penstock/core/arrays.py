"""Names for the types of numpy arrays, and their addresses; shapes are said where they are used."""

from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]  # Any: the dtype is the caller's choice
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]
Table = Int32 | Int64
"""Pieces [p, 4] int32 or int64, as in PackedPool."""


def address(array: Array) -> int:
    """Return the address of an array's first byte."""
    return int(array.__array_interface__["data"][0])

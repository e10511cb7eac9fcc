"""What a run's sample logs say of each row of tokens, for an audit to compare; imports no torch."""

import zlib

import numpy as np
import numpy.typing as npt


def checksums(input_ids: npt.NDArray[np.int64]) -> list[int]:
    """Return the CRC-32 of each row of tokens [rows, length], in the order of the rows.

    >>> checksums(np.array([[1, 2], [1, 3]]))
    [16178617, 3428637991]
    """
    return [zlib.crc32(row.tobytes()) for row in input_ids]

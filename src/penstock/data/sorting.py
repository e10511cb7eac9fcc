"""Stable sorting of small integers: several times as fast as numpy's stable argsort."""

import numpy as np

from penstock.data.types import Int64


def stable_order(values: Int64) -> Int64:
    """Return the stable argsort of integers [n] from 0 to 2^63 / 2n.

    One sort of distinct keys, each a value above its index. Numpy sorts integers with vector instructions,
    which it cannot do for a stable argsort of wide ones.

    >>> stable_order(np.array([5, 3, 5, 3])).tolist()
    [1, 3, 0, 2]
    """
    bits = len(values).bit_length()
    keys = values << bits
    keys |= np.arange(len(values))
    keys.sort()
    keys &= (1 << bits) - 1
    return keys

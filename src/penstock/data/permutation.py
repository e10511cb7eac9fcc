"""A keyed bijection on [0, n) in O(1) memory: a Feistel network with cycle walking.

Shuffling a hundred trillion tokens by an array of indices takes terabytes and hours; a Feistel
network computes any element of the permutation from its index alone. The halves may differ by one
bit (an alternating, unbalanced network), so the domain is the smallest power of two that holds n;
values outside [0, n) are permuted again until they fall inside (cycle walking: Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002), at most twice on average.

The round function is a shift-xor-multiply mixer. Rounds that only multiply and add leak the lowest
bit (parity) of the index through all rounds.
"""

import numpy as np

from penstock.core.rng import mix64
from penstock.data.types import Int64

_ROUNDS = 6  # even, so that halves of unequal width end where they began


class Permutation:
    """The bijection chosen by `key` among those on [0, n).

    >>> sorted(Permutation(10, key=7)(np.arange(10)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, n: int, *, key: int) -> None:
        self._n = np.uint64(n)
        bits = max(n - 1, 0).bit_length()
        self._left, self._right = bits // 2, bits - bits // 2
        counters = np.arange(_ROUNDS, dtype=np.uint64)
        self._round_keys = mix64(counters + np.uint64(key))  # wraps around by design

    def __call__(self, indices: Int64) -> Int64:
        """Map indices in [0, n), any shape, to their images."""
        values = self._network(indices.astype(np.uint64))
        while (outside := values >= self._n).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def inverse(self, images: Int64) -> Int64:
        """Map images in [0, n), any shape, back to their indices.

        >>> permutation = Permutation(1000, key=7)
        >>> permutation.inverse(permutation(np.arange(3))).tolist()
        [0, 1, 2]
        """
        values = self._network_back(images.astype(np.uint64))
        while (outside := values >= self._n).any():
            values[outside] = self._network_back(values[outside])
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> np.uint64(self._right), values & _mask(self._right)
        left_bits, right_bits = self._left, self._right
        for round_key in self._round_keys:
            left, right = right, left ^ (mix64(right ^ round_key) & _mask(left_bits))
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right

    def _network_back(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> np.uint64(self._right), values & _mask(self._right)
        for index, round_key in reversed(list(enumerate(self._round_keys))):
            left_bits = self._right if index % 2 else self._left
            left, right = right ^ (mix64(left ^ round_key) & _mask(left_bits)), left
        return (left << np.uint64(self._right)) | right


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)

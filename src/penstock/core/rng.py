"""Random numbers as functions: a 64-bit key from (seed, names), then values from (key, index).

There is no state, so adding a corpus, a rank or a step never reseeds another. Keys are hashes, not sums: seed
1 of epoch 2 is unrelated to seed 2 of epoch 1. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), a bijection on 64-bit integers. numpy's own
generators are not used because their streams may change between versions (NEP 19), and the order of a run
must not.
"""

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key_of(seed: int, *names: str | int) -> int:
    """Return a 64-bit key for a purpose: a hash of the seed and any number of names.

    >>> key_of(0, "blocks", "web", 1) == key_of(0, "blocks", "web", 1)
    True
    >>> key_of(0, "a", "bc") == key_of(0, "ab", "c")
    False
    """
    text = "\0".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers with a bijection; same shape out, wrap-around arithmetic."""
    z = values + _GOLDEN
    z ^= z >> np.uint64(30)
    z *= _MIX_1
    z ^= z >> np.uint64(27)
    z *= _MIX_2
    z ^= z >> np.uint64(31)
    return z


def shuffled(n: int, key: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(n) that depends on `key` only: [n] int64, O(n) memory.

    The sort keys are distinct (mix64 is a bijection), so the order does not depend on how the
    sort treats ties.

    >>> sorted(shuffled(5, key_of(0, "demo")).tolist())
    [0, 1, 2, 3, 4]
    """
    counters = np.arange(n, dtype=np.uint64)
    keys = mix64(counters ^ np.uint64(key))
    # numpy sorts values several times as fast as it argsorts them, so each index replaces the lowest bits of
    # its key. Keys that differ only in those bits are one in millions; then argsort is used.
    lowest = np.uint64((1 << n.bit_length()) - 1)
    marked = keys & ~lowest
    marked |= counters
    marked.sort()
    if ((marked[1:] ^ marked[:-1]) <= lowest).any():
        return np.argsort(keys).astype(np.int64, copy=False)
    marked &= lowest
    return marked.view(np.int64)

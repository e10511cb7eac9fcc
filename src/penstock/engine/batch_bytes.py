"""A batch as bytes, to send it to the other ranks of an engine; no torch.

Each array is announced by four integers (bytes of an element, dims, and the size of the first two) and begins
at a multiple of 8 bytes, so that the receiver's arrays are views of what it received.
"""

from dataclasses import fields

import numpy as np

from penstock.engine.batch import Batch

_NAMES = tuple(field.name for field in fields(Batch))
_TYPES: dict[int, np.dtype[np.signedinteger]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}
_ALIGNED = 8


def encode(batch: Batch) -> bytes:
    """Return a batch as bytes.

    >>> none = np.zeros(0, np.int64)
    >>> batch = Batch(**{**dict.fromkeys(_NAMES, none), "token_ids": np.array([7, 8])})
    >>> decode(bytearray(encode(batch))).token_ids.tolist()
    [7, 8]
    """
    arrays = [np.ascontiguousarray(getattr(batch, name)) for name in _NAMES]
    head = [(a.itemsize, a.ndim, a.shape[0], a.shape[1] if a.ndim == 2 else 1) for a in arrays]
    padded = (array.tobytes() + bytes(-array.nbytes % _ALIGNED) for array in arrays)
    return b"".join((np.array(head, np.int64).tobytes(), *padded))


def decode(content: bytearray | memoryview) -> Batch:
    """Return the batch of `encode`; its arrays are views of `content`, which must be writable."""
    head = np.frombuffer(content, np.int64, count=4 * len(_NAMES)).reshape(-1, 4)
    arrays, start = {}, head.nbytes
    for name, (size, dims, first, second) in zip(_NAMES, head.tolist(), strict=True):
        flat = np.frombuffer(content, _TYPES[size], count=first * second, offset=start)
        arrays[name] = flat.reshape(first, second) if dims == 2 else flat
        start += flat.nbytes + -flat.nbytes % _ALIGNED
    return Batch(**arrays)

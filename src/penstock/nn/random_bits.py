"""64 random bits as a function of an index: `core.rng.mix64` in torch's int64 arithmetic, the same bits.

The index of an element of a sharded tensor is its place in the whole tensor, so its bits do not depend on the
sharding.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Int64
from torch import Tensor

from penstock.nn.dtensor import held_box, local

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_CHUNK = 2**18  # elements at a time: about 10 MB of temporaries, which stay in a CPU's cache
_CHUNK_ON_GPU = 2**23  # elements: few launches, a third of a gigabyte of temporaries


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


def keyed_bits(index: Int64[Tensor, "n"], key: int) -> Int64[Tensor, "n"]:
    """Return 64 random bits for each index, the same on every machine."""
    return mix64(index ^ signed(key))


def element_indices(parameter: Tensor) -> Iterator[tuple[slice, Int64[Tensor, "n"]]]:
    """Yield slices of this rank's flat shard, and the index of each of their elements in the whole tensor."""
    here = local(parameter)
    offset, shape = held_box(parameter)
    assert here.is_contiguous() and tuple(here.shape) == shape, (here.stride(), here.shape, shape)  # noqa: PT018
    chunk = _CHUNK if here.device.type == "cpu" else _CHUNK_ON_GPU
    for start in range(0, here.numel(), chunk):
        stop = min(start + chunk, here.numel())
        counter = torch.arange(start, stop, device=here.device)
        index = _global_index(counter, shape, offset=offset, full=tuple(parameter.shape))
        yield slice(start, stop), index


def _global_index(
    counter: Tensor, shape: tuple[int, ...], *, offset: tuple[int, ...], full: tuple[int, ...]
) -> Tensor:
    if shape[1:] == full[1:]:  # whole rows need no division per element
        return counter + offset[0] * math.prod(full[1:])
    index, stride = torch.zeros_like(counter), 1
    for size, first, extent in zip(reversed(shape), reversed(offset), reversed(full), strict=True):
        index += (counter % size + first) * stride
        counter = counter // size
        stride *= extent
    return index

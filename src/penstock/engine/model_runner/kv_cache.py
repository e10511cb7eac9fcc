"""KV cache: pages with the keys and values of every block and layer, and their binding to one step.

One tensor for all layers, allocated once when the engine opens, so that running out of memory is the
scheduler's decision (a number of blocks) and not an accident of an allocator. `scheduling/blocks.py` alone
knows which sequence holds which block.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.huge_pages import reserve
from penstock.engine.config import Cache
from penstock.nn.attention import Attend
from penstock.nn.kernels.paged import LayerPages, Paged
from penstock.nn.kernels.pages import SCALE_SIZE, PagedStep, page_width


class PagedCache:
    """Pages for keys and values.

    Args:
        num_layers: layers of the network.
        num_blocks: blocks of the scheduler's pool.
        kv_heads: key-value heads of this rank.
        dtype: dtype of the model, or int8.
        has_singles: False: shares of one token are attended by the kernel of longer ones.
        kernels: as in `PagedStep`; None: Triton.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        has_singles: bool = True,
        kernels: Mapping[str, str] | None = None,
    ) -> None:
        self._has_singles = has_singles
        self._kernels = kernels or {}
        width = page_width(head_dim, dtype)
        shape = (num_layers, 2, num_blocks, kv_heads, block_size, width)
        self.pages = _zeros(shape, dtype=dtype, device=device)
        """[layers, 2 (keys, values), blocks, kv_heads, block_size, width]; the width is head_dim, plus the
        bytes of a scale for int8 (nn/kernels/pages.py)."""
        # views once: making them costs as much as a small kernel
        self._layers = [(layer[0], layer[1]) for layer in self.pages]

    @property
    def device(self) -> torch.device:
        """Device of the pages."""
        return self.pages.device

    def bound(self, step: PagedStep) -> "BoundCache":
        """Return the cache of one step, as the network takes it."""
        if not self._has_singles:
            step = replace(step, num_singles=0)
        if self._kernels:
            step = replace(step, kernels=self._kernels)
        return BoundCache([LayerPages(keys, values, step) for keys, values in self._layers], step)


@dataclass(frozen=True, slots=True)
class BoundCache:
    """Cache argument of `Llama.hidden` for one step."""

    layers: Sequence[LayerPages]
    step: PagedStep

    def attend(self, window: int | None) -> Attend:
        """Return attention over the pages of this step's sequences."""
        return Paged(self.step, window)


def type_of_pages(cache: Cache, *, dtype: torch.dtype, head_dim: int) -> torch.dtype:
    """Return the dtype of the pages, given the dtype of the model.

    Raises:
        ConfigError: int8, and head_dim is not a multiple of the scale's size.
    """
    if cache == "auto":
        return dtype
    if head_dim % SCALE_SIZE:
        raise ConfigError(
            f"cache={cache} needs head_dim to be a multiple of {SCALE_SIZE}",
            got=head_dim,
            fix="Leave cache out.",
        )
    return torch.int8


def bytes_per_block(
    num_layers: int, *, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes of one block over all layers.

    >>> bytes_per_block(32, block_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    2097152
    >>> bytes_per_block(32, block_size=16, kv_heads=8, head_dim=128, dtype=torch.int8)
    1081344
    """
    return 2 * num_layers * block_size * kv_heads * page_width(head_dim, dtype) * dtype.itemsize


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU the memory is allocated when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = reserve(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)  # keeps the map open

"""The pages: keys and values of every block of every layer, and their binding to one step.

One tensor for all layers, allocated when the engine opens and never again, so that running out of memory is
the scheduler's decision (a number of blocks) and no accident of an allocator. Which block belongs to whom is
known to `blocks.py` alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.huge_pages import reserve
from penstock.engine.batch import Batch
from penstock.engine.config import Cache
from penstock.nn.attention import Attend
from penstock.nn.kernels.page_rows import SCALE_SIZE, row_size
from penstock.nn.kernels.paged import LayerPages, Paged
from penstock.nn.kernels.paged_step import PagedStep


class PagedCache:
    """Room for keys and values.

    Args:
        num_layers: blocks of the network.
        num_blocks: as many as the scheduler's pool has.
        kv_heads: of this rank.
        dtype: that of the model, or int8.
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
    ) -> None:
        row = row_size(head_dim, dtype)
        shape = (num_layers, 2, num_blocks, kv_heads, block_size, row)
        self.pages = _zeros(shape, dtype=dtype, device=device)
        """[layers, keys and values, blocks, kv_heads, block_size, row]; a row is head_dim numbers, or as
        page_rows.py says."""
        # once: views cost as much as small kernels
        self._layers = [(layer[0], layer[1]) for layer in self.pages]

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.pages.device

    def bind(self, batch: Batch) -> "BoundCache":
        """Return the cache as the network sees it in one step."""
        step = PagedStep.from_arrays(
            slots=batch.slots,
            query_starts=batch.query_starts,
            lengths=batch.lengths,
            block_tables=batch.block_tables,
            device=self.device,
        )
        return self.bound(step)

    def bound(self, step: PagedStep) -> "BoundCache":
        """Return the cache as the network sees it in a step whose integers are tensors already."""
        return BoundCache([LayerPages(keys, values, step) for keys, values in self._layers], step)


@dataclass(frozen=True, slots=True)
class BoundCache:
    """What `Llama.hidden` takes as its cache."""

    layers: Sequence[LayerPages]
    step: PagedStep

    def attend(self, window: int | None) -> Attend:
        """Return attention over the pages of this step's sequences."""
        return Paged(self.step, window)


def type_of_pages(cache: Cache, *, dtype: torch.dtype, head_dim: int) -> torch.dtype:
    """Return what a model of that type keeps its keys and values in.

    Raises:
        ConfigError: int8, and a scale would not lie at a multiple of its size.
    """
    if cache == "auto":
        return dtype
    if head_dim % SCALE_SIZE:
        raise ConfigError(
            f"cache={cache} needs heads of a multiple of {SCALE_SIZE} numbers",
            got=head_dim,
            fix="Leave cache out.",
        )
    return torch.int8


def bytes_per_block(
    num_layers: int, *, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes of one block, all layers.

    >>> bytes_per_block(32, block_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    2097152
    >>> bytes_per_block(32, block_size=16, kv_heads=8, head_dim=128, dtype=torch.int8)
    1081344
    """
    return 2 * num_layers * block_size * kv_heads * row_size(head_dim, dtype) * dtype.itemsize


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; a CPU's memory is taken when it is first written, not now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = reserve(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)  # holds the map open

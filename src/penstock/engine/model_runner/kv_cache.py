"""KV cache: pages with the keys and values of every block and layer, and their binding to one step.

A block has room for the layers of one cache group (scheduling/groups.py), and all groups take blocks of one
pool: a layer has a group, whose block table it reads, and a row in that group's blocks.

One tensor for all groups, allocated once when the engine opens, so that running out of memory is the
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
        num_layers: layers with attention, or with groups the layers that a block has room for.
        num_blocks: blocks of the scheduler's pool.
        kv_heads: key-value heads of this rank.
        dtype: dtype of the model, or int8.
        has_singles: False: shares of one token are attended by the kernel of longer ones.
        kernels: as in `PagedStep`; None: Triton.
        groups: layers of each cache group; None: one group of all layers.
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
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._has_singles = has_singles
        self._kernels = kernels or {}
        width = page_width(head_dim, dtype)
        shape = (num_layers, 2, num_blocks, kv_heads, block_size, width)
        self.pages = _zeros(shape, dtype=dtype, device=device)
        """[rows, 2 (keys, values), blocks, kv_heads, block_size, width]; the width is head_dim, plus the
        bytes of a scale for int8 (nn/kernels/pages.py)."""
        groups = [range(num_layers)] if groups is None else groups
        self.num_groups = len(groups)
        """Number of cache groups."""
        of_layer = {
            layer: (group, row) for group, layers in enumerate(groups) for row, layer in enumerate(layers)
        }
        self.places = [of_layer[layer] for layer in range(len(of_layer))]
        """Group and row of each layer with attention."""
        # views once: making them costs as much as a small kernel
        self._layers = [(group, self.pages[row, 0], self.pages[row, 1]) for group, row in self.places]

    @property
    def device(self) -> torch.device:
        """Device of the pages."""
        return self.pages.device

    def bound(self, *steps: PagedStep) -> "BoundCache":
        """Return the cache of one step, as the network takes it; `steps` has one for each group."""
        if not self._has_singles:
            steps = tuple(replace(step, num_singles=0) for step in steps)
        if self._kernels:
            steps = tuple(replace(step, kernels=self._kernels) for step in steps)
        return BoundCache([LayerPages(keys, values, steps[group]) for group, keys, values in self._layers])


@dataclass(frozen=True, slots=True)
class BoundCache:
    """Cache argument of `Decoder.hidden` for one step."""

    layers: Sequence[LayerPages]

    @property
    def step(self) -> PagedStep:
        """Step of the first layer's group; groups differ in their slots and block tables."""
        return self.layers[0].step

    def attends(self, windows: Sequence[int | None]) -> list[Attend]:
        """Return the attention of each of `layers` over the pages of this step's sequences."""
        kinds = [(id(pages.step), window) for pages, window in zip(self.layers, windows, strict=True)]
        made: dict[tuple[int, int | None], Attend] = {}
        for kind, pages in zip(kinds, self.layers, strict=True):
            if kind not in made:
                made[kind] = Paged(pages.step, kind[1])
        return [made[kind] for kind in kinds]


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
    """Return the bytes of one block; `num_layers` as in `PagedCache`.

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

"""Steps of a whole network by one C++ operator, where all of its layers are such that it can compute them.

The operator (nn/native/network.h) is handed the operands of all blocks once, and integers in each step. It
computes what the modules do, to the same bits. Of the last block it leaves out what nobody asks for: a token
before the first of its share whose logits or hidden state are wanted gives its key and value, no more.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.engine.adapter_file import Lora
from penstock.engine.adapter_panels import adapter_panels
from penstock.engine.batch import Batch
from penstock.engine.fuse import FusedBlock
from penstock.engine.kv_cache import PagedCache
from penstock.models.llama.model import Llama
from penstock.nn.block_operands import BlockOperands, operands_of
from penstock.nn.fused import FusedRMSNorm
from penstock.nn.packed import TiledLinear
from penstock.nn.rope import RopeCache


class _Network(Protocol):
    """`torch.classes.penstock.Network`."""

    def run(self, *integers_and_angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits."""
        ...

    def hold(self, index: int, panels: list[Tensor | None], rank: int) -> None:
        """Take an adapter: of each layer its A and its B."""
        ...

    def release(self, index: int) -> None:
        """Forget an adapter."""
        ...


class WholeSteps:
    """Computes steps over pages; for one thread.

    Args:
        network: of the model and the pages.
    """

    def __init__(self, network: _Network, rope: RopeCache, model: Llama, dtype: torch.dtype) -> None:
        self._network, self._rope, self._model, self._dtype = network, rope, model, dtype
        self._logits_scaling = model.config.logits_scaling

    def hold(self, index: int, loras: Mapping[str, Lora]) -> None:
        """Compute with an adapter where a batch calls for it by this index."""
        self._network.hold(index, *adapter_panels(loras, self._model, self._dtype))

    def release(self, index: int) -> None:
        """Forget an adapter; one that is not held is none to forget."""
        self._network.release(index)

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return hidden states [t, hidden], of the tokens that the batch asks for, and logits [r, vocab]."""
        cosines, sines = self._rope.up_to(int(batch.positions.max()))
        ids, positions, *rest = map(torch.from_numpy, _arrays(batch))
        hidden, logits = self._network.run(ids, positions, cosines, sines, *rest)
        return hidden, logits if self._logits_scaling == 1.0 else logits / self._logits_scaling


def whole_steps(model: Llama, cache: PagedCache) -> WholeSteps | None:
    """Return what computes a model's steps with its layers as they are now; None: modules have to compute."""
    layers = [_operands(block, cache) for block in model.layers]
    blocks = [block for block in layers if block is not None]
    head, norm = operands_of(model.unembed), model.norm
    if len(blocks) < len(layers) or head is None or isinstance(model.unembed, TiledLinear):
        return None
    eps, scale = blocks[0].eps, blocks[0].scale
    if type(model.embed) is not nn.Embedding or type(norm) is not FusedRMSNorm or norm.eps != eps:
        return None
    assert model.unembed is not None
    network = torch.classes.penstock.Network(
        [operand for block in blocks for operand in (*block.linears, *block.norms)],
        [model.embed.weight.detach(), norm.weight.detach(), *head],
        [*(size for block in blocks for size in block.outputs), model.unembed.out_features],
        [window or 0 for window in model.config.windows],
        [eps, scale, model.config.residual_multiplier, model.embedding_multiplier],
        cache.pages,
    )
    rope = RopeCache(
        lambda positions: model.rope(positions, cache.pages.dtype),
        max_positions=model.config.context,
    )
    return WholeSteps(network, rope, model, cache.pages.dtype)


def _operands(layer: nn.Module, cache: PagedCache) -> BlockOperands | None:
    operands = layer.operands_now() if isinstance(layer, FusedBlock) else None
    if operands is None or any(isinstance(linear, TiledLinear) for linear in operands.layers):
        return None
    norm = operands.norms[0]
    return operands if norm is not None and norm.dtype == cache.pages.dtype else None


def _arrays(batch: Batch) -> Iterator[np.ndarray]:
    yield from (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.lengths)
    yield np.ascontiguousarray(batch.block_tables)
    yield from (batch.logit_rows, batch.vector_rows, batch.adapters)

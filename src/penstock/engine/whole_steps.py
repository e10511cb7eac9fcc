"""Steps of a whole network by one C++ operator, where all of its layers are such that it can compute them.

The operator (nn/native/network.h) is handed the operands of all blocks once, and integers in each step. It
computes what the modules do, to the same bits. Of the last block it leaves out what nobody asks for: a token
before the first of its share whose logits or hidden state are wanted gives its key and value, no more.

Of a rank's part it is handed the board besides, on which ranks exchange what they sum (ranks/board.py).
Either all of them compute in this way or none, for all must make the same exchanges.
"""

import math
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
from penstock.engine.ranks.board import SLOT_BYTES
from penstock.engine.ranks.group import RankGroup
from penstock.engine.ranks.tensor_parallel import SummedEmbedding, SummedLinear, vocabulary_of
from penstock.models.llama.model import Llama
from penstock.nn.block_operands import BlockOperands, operands_of
from penstock.nn.fused import FusedRMSNorm
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
        most_tokens: of a step.
    """

    def __init__(
        self, network: _Network, rope: RopeCache, model: Llama, *, dtype: torch.dtype, most_tokens: float
    ) -> None:
        self._network, self._rope, self._model, self._dtype = network, rope, model, dtype
        self._logits_scaling, self._most_tokens = model.config.logits_scaling, most_tokens

    def takes(self, batch: Batch) -> bool:
        """Whether it can compute the step."""
        return len(batch.token_ids) <= self._most_tokens

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


def whole_steps(model: Llama, cache: PagedCache, group: RankGroup | None = None) -> WholeSteps | None:
    """Return what computes a model's steps with its layers as they are now; None: modules have to compute.

    Args:
        group: the ranks that share each layer, all of which call this now; None: the model is whole.
    """
    if group is not None and group.board is None:
        return None
    blocks = _blocks(model, cache)
    if group is not None and group.sum(torch.tensor([float(blocks is not None)])) < group.place.ranks:
        return None
    return None if blocks is None else _of_blocks(model, cache, blocks, group)


def _of_blocks(
    model: Llama, cache: PagedCache, blocks: list[BlockOperands], group: RankGroup | None
) -> WholeSteps:
    head = operands_of(model.unembed)
    assert head is not None and model.unembed is not None  # noqa: PT018
    board = None if group is None else group.board
    network = torch.classes.penstock.Network(
        [operand for block in blocks for operand in (*block.linears, *block.norms)],
        [model.embed.weight.detach(), model.norm.weight.detach(), *head],
        [*(size for block in blocks for size in block.outputs), model.unembed.out_features],
        [window or 0 for window in model.config.windows],
        [blocks[0].eps, blocks[0].scale, model.config.residual_multiplier, model.embedding_multiplier],
        vocabulary_of(model, group),
        cache.pages,
        None if board is None else board.native_board,
    )
    dtype = model.norm.weight.dtype
    rope = RopeCache(
        lambda positions: model.rope(positions, dtype),
        max_positions=model.config.context,
    )
    most_tokens = math.inf if board is None else SLOT_BYTES // model.norm.weight.nbytes
    return WholeSteps(network, rope, model, dtype=dtype, most_tokens=most_tokens)


def _blocks(model: Llama, cache: PagedCache) -> list[BlockOperands] | None:
    """Return the operands of all blocks, if the operator can compute the network."""
    found = [_operands(block, cache) for block in model.layers]
    blocks = [block for block in found if block is not None]
    head, norm = operands_of(model.unembed), model.norm
    if len(blocks) < len(found) or head is None:
        return None
    if type(model.embed) not in (nn.Embedding, SummedEmbedding):
        return None
    return blocks if type(norm) is FusedRMSNorm and norm.eps == blocks[0].eps else None


def _operands(layer: nn.Module, cache: PagedCache) -> BlockOperands | None:
    if not isinstance(layer, FusedBlock):
        return None
    inside = (linear.linear if isinstance(linear, SummedLinear) else linear for linear in layer.linears_now())
    operands = layer.operands_with(tuple(inside))
    norm = None if operands is None else operands.norms[0]
    return operands if norm is not None and cache.pages.dtype in (norm.dtype, torch.int8) else None


def _arrays(batch: Batch) -> Iterator[np.ndarray]:
    yield from (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.lengths)
    yield np.ascontiguousarray(batch.block_tables)
    yield from (batch.logit_rows, batch.vector_rows, batch.adapters)

"""Native decoder: a whole step of the network in one C++ call, adapters included.

Layers that read the same input are merged into one product, and so are their updates (adapted_linear.py): the
A matrices are stacked by rows. A layer that an adapter does not change gets zeros, factors of 1 and shifts of
0.

The operator (nn/native/network.h) gets the operands of all blocks once, and integers in each step. Its
results are bit-identical to those of the modules. In the last block it skips what is not needed: tokens
before the first of their share whose logits or hidden state are wanted only write their key and value.

With tensor parallelism it also gets the shared memory in which ranks sum
(engine/model_runner/collectives.py). Either all ranks use the native decoder or none, because all must make
the same exchanges.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.engine.model_runner.adapted_linear import AdapterUpdate, neutral_scaling
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.collectives import SLOT_BYTES, RankGroup
from penstock.engine.model_runner.kv_cache import PagedCache
from penstock.engine.model_runner.serving_layers import FusedBlock
from penstock.engine.model_runner.tensor_parallel import SummedEmbedding, SummedLinear, vocabulary_of
from penstock.models.decoder.model import Decoder
from penstock.nn.attention import parts_of
from penstock.nn.fused import BlockOperands, FusedRMSNorm, operands_of
from penstock.nn.linear.packed import MergedLinear, to_panels
from penstock.nn.rope import RopeCache

_LAYERS = (
    ("attention", "query_key_value"),
    ("attention", "output"),
    ("mlp", "gate_up"),
    ("mlp", "down"),
)
"""Linear layers of a fused block, in the operator's order."""


def adapter_panels(
    updates: Mapping[str, AdapterUpdate], model: Decoder, dtype: torch.dtype
) -> tuple[list[Tensor | None], int]:
    """Return the packed panels of A and of B and the scaling of each layer of each block, and the rank after
    padding.

    Args:
        updates: by layer name in the plain network; all of one LoRA rank.
        model: fused; defines which layers are merged.
    """
    numbers = 4 // dtype.itemsize
    rank = -(-len(next(iter(updates.values())).a) // numbers) * numbers
    operands: list[Tensor | None] = []
    for number, block in enumerate(model.layers):
        for of, name in _LAYERS:
            layer = block.get_submodule(f"{of}.{name}")
            parts = dict(_parts(name, layer))
            found = {part: updates.get(f"layers.{number}.{of}.{part}") for part in parts}
            operands += _merged(found, parts, rank, dtype)
    return operands, rank


def _parts(name: str, layer: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield name and number of outputs of the plain layers that a merged layer consists of."""
    if isinstance(layer, MergedLinear):
        yield from layer.parts
    else:
        yield name, 0  # not merged: the update has the number of outputs


def _merged(
    found: Mapping[str, AdapterUpdate | None], sizes: Mapping[str, int], rank: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    some = next((update for update in found.values() if update is not None), None)
    if some is None:
        return None, None, None
    a = torch.zeros(len(found), rank, some.a.shape[1], dtype=dtype)
    b = [torch.zeros(size, rank, dtype=dtype) for size in sizes.values()]
    scaling = [neutral_scaling(size) for size in sizes.values()]
    for part, update in enumerate(found.values()):
        if update is not None:
            a[part, : len(update.a)] = update.a
            b[part] = nn.functional.pad(update.b.to(dtype), (0, rank - len(update.a)))
            if update.scaling is not None:
                scaling[part] = update.scaling
    scales = any(update is not None and update.scaling is not None for update in found.values())
    return (
        to_panels(a.flatten(0, 1)),
        torch.cat([to_panels(matrix) for matrix in b]),
        torch.cat(scaling, dim=1) if scales else None,
    )


class _Network(Protocol):
    """`torch.classes.penstock.Network`."""

    def run(self, *integers_and_angles: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits."""
        ...

    def hold(self, index: int, operands: list[Tensor | None], rank: int) -> None:
        """Store an adapter: A, B and scaling of each layer."""
        ...

    def release(self, index: int) -> None:
        """Drop an adapter."""
        ...

    def extend(self, rows: Tensor | None) -> None:
        """Take the rows of the embedding behind those of the model."""
        ...


class NativeDecoder:
    """Computes whole steps over the paged KV cache; for one thread.

    Args:
        network: C++ object with the operands of the model and its pages.
        most_tokens: maximum tokens of a step.
    """

    def __init__(
        self, network: _Network, rope: RopeCache, model: Decoder, *, dtype: torch.dtype, most_tokens: float
    ) -> None:
        self._network, self._rope, self._model, self._dtype = network, rope, model, dtype
        self._logits_scaling, self._most_tokens = model.config.logits_scaling, most_tokens
        self._added: Tensor | None = None

    def takes(self, batch: StepBatch) -> bool:
        """True if the step is within `most_tokens`."""
        return len(batch.token_ids) <= self._most_tokens

    def hold(self, index: int, updates: Mapping[str, AdapterUpdate]) -> None:
        """Store an adapter under its index in batches."""
        self._network.hold(index, *adapter_panels(updates, self._model, self._dtype))

    def release(self, index: int) -> None:
        """Drop an adapter; unknown indices are ignored."""
        self._network.release(index)

    def extend(self, rows: Tensor | None) -> None:
        """Take the rows of the embedding behind those of the model, [added, hidden]; None: there are none."""
        if rows is not self._added:
            self._network.extend(rows)
            self._added = rows

    def run(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Return hidden states [t, hidden], defined for the tokens that the batch needs, and logits [r,
        vocab] before a softcap."""
        tables = self._rope.up_to(int(batch.positions.max()))
        ids, positions, *rest = map(torch.from_numpy, _arrays(batch))
        hidden, logits = self._network.run(ids, positions, *tables, *rest)
        return hidden, logits if self._logits_scaling == 1.0 else logits / self._logits_scaling


def open_native_decoder(
    model: Decoder, cache: PagedCache, group: RankGroup | None = None
) -> NativeDecoder | None:
    """Return the native decoder of a model with its present layers; None if a layer is not supported.

    Args:
        group: the tensor-parallel group, all ranks of which call this together; None: one rank.
    """
    if group is not None and group.board is None:
        return None
    blocks = _blocks(model, cache)
    if group is not None and group.sum(torch.tensor([float(blocks is not None)])) < group.place.ranks:
        return None
    return None if blocks is None else _of_blocks(model, cache, blocks, group)


def _of_blocks(
    model: Decoder, cache: PagedCache, blocks: list[BlockOperands], group: RankGroup | None
) -> NativeDecoder:
    head = operands_of(model.unembed)
    assert head is not None and model.unembed is not None  # noqa: PT018
    board = None if group is None else group.board
    network = torch.classes.penstock.Network(
        [operand for block in blocks for operand in (*block.linears, *block.norms, block.sinks)],
        [model.embed.weight.detach(), model.norm.weight.detach(), *head],
        [*(size for block in blocks for size in block.outputs), model.unembed.out_features],
        [window or 0 for window in model.config.windows],
        list(model.rope_of),
        [number for place in cache.places for number in place],
        [
            blocks[0].eps,
            blocks[0].scale,
            model.config.residual_multiplier,
            model.embedding_factor(model.norm.weight.dtype),
            blocks[0].shift,
            blocks[0].softcap,
        ],
        [
            blocks[0].activation,
            blocks[0].is_gated,
            model.config.family.qk_norm == "whole",
            blocks[0].norms_rotated,
        ],
        vocabulary_of(model, group),
        cache.pages,
        None if board is None else board.native_board,
    )
    dtype = model.norm.weight.dtype
    rope = RopeCache(partial(_tables, model, dtype), max_positions=model.config.context)
    most_tokens = math.inf if board is None else SLOT_BYTES // model.norm.weight.nbytes
    return NativeDecoder(network, rope, model, dtype=dtype, most_tokens=most_tokens)


def _tables(model: Decoder, dtype: torch.dtype, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return cosines and sines, each [rules, n, 1, head_dim], in the order of `model.rope_rules`, and the
    factors on queries, [1, n, 1, 1], which are the same for all rules."""
    cosines, sines, scales = zip(*map(parts_of, model.ropes(positions, dtype)), strict=True)
    return torch.cat(cosines), torch.cat(sines), scales[0]


def _blocks(model: Decoder, cache: PagedCache) -> list[BlockOperands] | None:
    """Return the operands of all blocks; None if the operator cannot compute the network."""
    found = [_operands(block, cache) for block in model.layers]
    blocks = [block for block in found if block is not None]
    head, norm = operands_of(model.unembed), model.norm
    if len(blocks) < len(found) or head is None:
        return None
    if type(model.embed) not in (nn.Embedding, SummedEmbedding):
        return None
    is_like = type(norm) is FusedRMSNorm and (norm.eps, norm.shift) == (blocks[0].eps, blocks[0].shift)
    return blocks if is_like else None


def _operands(layer: nn.Module, cache: PagedCache) -> BlockOperands | None:
    if not isinstance(layer, FusedBlock):
        return None
    inside = (linear.linear if isinstance(linear, SummedLinear) else linear for linear in layer.linears_now())
    operands = layer.operands_with(tuple(inside))
    norm = None if operands is None else next(norm for norm in operands.norms if norm is not None)
    return operands if norm is not None and cache.pages.dtype in (norm.dtype, torch.int8) else None


def _arrays(batch: StepBatch) -> Iterator[np.ndarray]:
    yield from (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.lengths)
    yield np.ascontiguousarray(batch.block_tables)
    yield from (batch.logit_rows, batch.vector_rows, batch.adapters)

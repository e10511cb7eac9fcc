"""Vocabulary parallelism: embedding and output matrix sharded by rows over the ranks of an axis.

A rank looks up the tokens whose rows it has and zeros for others; the sum over ranks is the embedding. The
loss needs no logits of other ranks: the maximum, the sum of exponentials and the label's logit are one number
per token each, reduced over the ranks (Shoeybi et al., "Megatron-LM", 2019, section 3).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

from penstock.nn.dtensor import local
from penstock.nn.head import OutputHead
from penstock.nn.linear.lora import Adapter
from penstock.nn.new_rows import NEW_ROWS, EmbeddingWithNewRows, OutputWithNewRows, joined, look_up
from penstock.parallel.collectives import (
    CollectiveGroup,
    all_reduce,
    gather,
    group_of,
    scatter_sum,
    sum_gradient,
)
from penstock.parallel.slices import become


class SlicedEmbedding(nn.Embedding):
    """Vocabulary-parallel embedding; each rank gets its slice of the positions."""

    group: CollectiveGroup
    first: int
    """Token id of this rank's first row."""

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [batch, seq] token ids; the result is [batch, seq / ranks, hidden]."""
        weight = local(self.weight)
        row = ids - self.first
        is_here = (row >= 0) & (row < weight.shape[0])
        found = functional.embedding(row.where(is_here, 0), weight)
        return scatter_sum(found * is_here[..., None], dim=1, group=self.group)


class SlicedEmbeddingWithNewRows(SlicedEmbedding, EmbeddingWithNewRows):
    """Vocabulary-parallel embedding whose last rows are learned; every rank holds all of these.

    A rank uses those of its token ids, so the gradients are summed over the ranks.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [batch, seq] token ids; the result is [batch, seq / ranks, hidden]."""
        weight = local(self.weight)
        new_rows = sum_gradient(local(self.new_rows), group=self.group)
        row = ids - self.first
        is_here = (row >= 0) & (row < weight.shape[0])
        first_new = self.num_embeddings - len(self.new_rows) - self.first
        found = look_up(row.where(is_here, 0), weight, new_rows, first=first_new)
        return scatter_sum(found * is_here[..., None], dim=1, group=self.group)

    def rows(self) -> Tensor:
        """Return this rank's rows of the matrix."""
        return _rows(self, num_old=self.num_embeddings - len(self.new_rows))


class SlicedOutputWithNewRows(OutputWithNewRows):
    """Vocabulary-parallel output matrix whose last rows are learned, as those of the embedding."""

    group: CollectiveGroup
    first: int
    """Token id of this rank's first row."""

    def rows(self) -> Tensor:
        """Return this rank's rows of the matrix."""
        return _rows(self, num_old=self.out_features - len(self.new_rows))


class SlicedOutputWithAdapter(nn.Linear):
    """Vocabulary-parallel output matrix with an adapter: B is sliced like the matrix, every rank holds A.

    Each rank's logits depend on A, so its gradients are summed over the ranks.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter | None
    scale: float


def _own_part(adapter: Adapter, group: CollectiveGroup) -> Adapter:
    """Return what this rank computes with of an output matrix's adapter."""
    a = sum_gradient(local(adapter.a), group=group)
    magnitude = None if adapter.magnitude is None else local(adapter.magnitude)
    return replace(adapter, a=a, b=local(adapter.b), magnitude=magnitude)


def _rows(matrix: SlicedEmbeddingWithNewRows | SlicedOutputWithNewRows, *, num_old: int) -> Tensor:
    weight = local(matrix.weight)
    new_rows = sum_gradient(local(matrix.new_rows), group=matrix.group)
    known = min(max(num_old - matrix.first, 0), len(weight))
    skipped = max(matrix.first - num_old, 0)
    # also where it is empty: all ranks take part in the sum of the gradients
    return joined(weight, new_rows[skipped : skipped + len(weight) - known], known=known)


def add_sliced_new_rows(model: nn.Module, num_rows: int, mesh: DeviceMesh, *, dtype: torch.dtype) -> None:
    """Let the last rows of a model's frozen, sliced embedding and output matrix be learned, in place."""
    for matrix, sliced in (
        (model.embed, SlicedEmbeddingWithNewRows),
        (model.unembed, SlicedOutputWithNewRows),
    ):
        if not isinstance(matrix, nn.Embedding | nn.Linear):
            continue
        empty = torch.empty(num_rows, matrix.weight.shape[1], dtype=dtype, device="meta")
        placed = distribute_tensor(empty, mesh, [Replicate()], src_data_rank=None)
        matrix.__class__ = sliced
        matrix.first = _first(model, mesh)  # type: ignore[assignment]  # not a module or tensor
        matrix.register_parameter(NEW_ROWS, nn.Parameter(placed))


@dataclass(frozen=True, slots=True)
class SlicedVocabulary:
    """This rank's rows of the output matrix, and reductions over the ranks."""

    first: int
    """Token id of this rank's first row."""
    group: CollectiveGroup

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks; no gradient."""
        return all_reduce(x, "max", self.group)

    def total(self, x: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; no gradient."""
        return all_reduce(x, "sum", self.group)


def slice_vocabulary(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard `embed` and `unembed`, if present, over a mesh, in place.

    Args:
        model: on the meta device; other pipeline stages may have its embedding or output matrix.
        mesh: one axis, whose size must divide the vocabulary.
    """
    if isinstance(model.embed, nn.Embedding):
        become(model.embed, SlicedEmbedding, mesh, {"weight": Shard(0)})
        model.embed.first = _first(model, mesh)  # type: ignore[assignment]  # not a module or tensor
    if isinstance(model.unembed, nn.Linear):
        become(model.unembed, nn.Linear, mesh, {"weight": Shard(0)})


def finish_with_slices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make a model call `finish` with the hidden states of all tokens and a vocabulary-parallel head."""
    vocabulary = SlicedVocabulary(_first(model, mesh), group_of(mesh))

    def finish_sliced(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:  # Any: torch's hook
        finish: Callable[[Tensor, OutputHead], Tensor] = kwargs["finish"]

        def finish_whole(hidden: Tensor, head: OutputHead) -> Tensor:
            adapter = None if head.adapter is None else _own_part(head.adapter, vocabulary.group)
            sliced = replace(head, weight=local(head.weight), vocabulary=vocabulary, adapter=adapter)
            return finish(gather(hidden, dim=1, group=vocabulary.group), sliced)

        return args, {**kwargs, "finish": finish_whole}

    if model.unembed is None or isinstance(model.unembed, nn.Linear):  # otherwise another stage has the loss
        model.register_forward_pre_hook(finish_sliced, with_kwargs=True)


def _first(model: nn.Module, mesh: DeviceMesh) -> int:
    first: int = cast(Any, model).config.vocab_size // mesh.size() * mesh.get_local_rank()
    return first

"""Vocabulary parallelism: embedding and output matrix sharded by rows over the ranks of an axis.

A rank looks up the tokens whose rows it has and zeros for others; the sum over ranks is the embedding. The
loss needs no logits of other ranks: the maximum, the sum of exponentials and the label's logit are one number
per token each, reduced over the ranks (Shoeybi et al., "Megatron-LM", 2019, section 3).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import functional

from penstock.nn.head import OutputHead
from penstock.parallel.collectives import CollectiveGroup, all_reduce, gather, group_of, scatter_sum
from penstock.parallel.slices import become, local


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
            sliced = replace(head, weight=local(head.weight), vocabulary=vocabulary)
            return finish(gather(hidden, dim=1, group=vocabulary.group), sliced)

        return args, {**kwargs, "finish": finish_whole}

    if model.unembed is None or isinstance(model.unembed, nn.Linear):  # otherwise another stage has the loss
        model.register_forward_pre_hook(finish_sliced, with_kwargs=True)


def _first(model: nn.Module, mesh: DeviceMesh) -> int:
    first: int = cast(Any, model).config.vocab_size // mesh.size() * mesh.get_local_rank()
    return first

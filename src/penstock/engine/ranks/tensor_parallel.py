"""A rank's part of a decoder, and the three places where it needs the others.

    tokens -> embed, sum -> [norm -> query key value -> attend -> output, sum
                             norm -> gate up -> multiply       -> down,   sum] -> norm -> logits, gather

Every rank has the same residual stream, so each computes what follows by itself, with the keys and values of
its own heads. Training cuts the same matrices otherwise (parallel/tensor.py: gradients, sequence parallel,
DTensors for checkpoints); here a message must cost as little as possible, for a step of one token has two a
layer.
"""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from penstock.engine.ranks.group import RankGroup
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.models.llama.slices import Place


class SummedLinear(nn.Module):
    """A linear layer whose inputs lie on several ranks; every rank gets all outputs.

    Args:
        linear: from this rank's inputs to summands of all outputs; may be replaced by what computes the same.
            On other ranks than the first its bias is taken from it, because it must be added once.
    """

    def __init__(self, linear: nn.Module, group: RankGroup) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear), type(linear)
        if group.place.rank > 0:
            linear.bias = None  # type: ignore[assignment]  # torch's way to have none
        self.linear: nn.Module = linear
        self._group = group

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer."""
        return self._group.sum(self.linear(x))


class SummedEmbedding(nn.Module):
    """An embedding whose rows lie on several ranks; every rank gets all vectors.

    Args:
        embedding: this rank's rows.
        first: token id of the first of them.
    """

    def __init__(self, embedding: nn.Embedding, group: RankGroup, *, first: int) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._group = group
        self._first = first

    def forward(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... hidden"]:
        """Look tokens up."""
        row = ids - self._first
        is_here = (row >= 0) & (row < len(self.weight))
        found = functional.embedding(row.where(is_here, 0), self.weight)
        return self._group.sum(found * is_here[..., None])


class GatheredLogits:
    """The logits of all ranks' rows of the output matrix, on the first rank; elsewhere nothing, [r, 0].

    Args:
        model: this rank's part, after `join_ranks`.
    """

    def __init__(self, model: Llama, group: RankGroup) -> None:
        self._model = model
        self._group = group
        self._sizes = np.diff(vocabulary_of(model, group)).tolist()

    def __call__(self, hidden: Float[Tensor, "r hidden"]) -> Float[Tensor, "r vocab"]:
        """Project; every rank must call it."""
        logits = self._model.logits(hidden)
        room = max(self._sizes) - logits.shape[-1]
        parts = self._group.gather(functional.pad(logits, (0, room)) if room else logits)
        if not parts:
            return logits[:, :0]
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], dim=-1)


def vocabulary_of(model: Llama, group: RankGroup | None) -> list[int]:
    """Return the first token of each rank's rows of the vocabulary, and the number of all."""
    ranks = 1 if group is None else group.place.ranks
    return [
        *(Place(rank, ranks).part(model.config.vocab_size).start for rank in range(ranks)),
        model.config.vocab_size,
    ]


def join_ranks(model: Llama, whole: LlamaConfig, group: RankGroup) -> None:
    """Make a rank's part of a decoder compute with the others', in place.

    Args:
        model: built of `slices.sliced_config(whole, …)`, with this rank's weights.
        whole: what all ranks together are.
    """
    first = group.place.part(whole.vocab_size).start
    model.embed = SummedEmbedding(model.embed, group, first=first)  # type: ignore[assignment]
    for block in model.layers:
        for of, last in (("attention", "output"), ("mlp", "down")):
            owner = block.get_submodule(of)
            setattr(owner, last, SummedLinear(owner.get_submodule(last), group))
    model.config = replace(model.config, vocab_size=whole.vocab_size)

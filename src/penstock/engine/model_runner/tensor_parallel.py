"""Tensor parallelism in serving: a rank's shard of the decoder, and where it communicates.

    tokens -> embed, sum -> [norm -> query key value -> attend -> output, sum
                             norm -> gate up -> multiply       -> down,   sum] -> norm -> logits, gather

Every rank has the same residual stream and computes what follows by itself, with the keys and values of its
own heads. Training shards the same matrices differently (parallel/tensor.py: gradients, sequence parallelism,
DTensors for checkpoints); here a message must cost as little as possible, because decoding one token takes
two per layer.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from penstock.engine.model_runner.collectives import RankGroup
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import TensorParallelRank


class SummedLinear(nn.Module):
    """Row-parallel linear layer: inputs are spread over the ranks; every rank gets all outputs.

    Args:
        linear: from this rank's inputs to partial sums of all outputs; may be replaced by an equivalent
            layer. The bias is removed on all ranks but the first, because it must be added once.
    """

    def __init__(self, linear: nn.Module, group: RankGroup) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear), type(linear)
        if group.place.rank > 0:
            linear.bias = None  # type: ignore[assignment]  # how torch spells no bias
        self.linear: nn.Module = linear
        self._group = group

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Apply the layer."""
        return self._group.sum(self.linear(x))


class SummedEmbedding(nn.Module):
    """Vocabulary-parallel embedding: rows are spread over the ranks; every rank gets all vectors.

    Args:
        embedding: this rank's rows.
        first: token id of its first row.
    """

    def __init__(self, embedding: nn.Embedding, group: RankGroup, *, first: int) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._group = group
        self._first = first

    def forward(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... hidden"]:
        """Return the embeddings of token ids."""
        row = ids - self._first
        is_here = (row >= 0) & (row < len(self.weight))
        found = functional.embedding(row.where(is_here, 0), self.weight)
        return self._group.sum(found * is_here[..., None])


@dataclass(frozen=True)
class GroupMeans:
    """Mean squares of queries and keys over the heads of all ranks, each of which has as many."""

    group: RankGroup

    def __call__(self, means: Float[Tensor, "... 2"]) -> Float[Tensor, "... 2"]:
        """Return the means over all ranks from those of this rank."""
        return self.group.sum(means) / self.group.place.ranks


class GatheredLogits:
    """Logits before a softcap, gathered from the vocabulary shards on the first rank; [r, 0] on others.

    Args:
        model: this rank's shard, after `join_ranks`.
    """

    def __init__(self, model: Decoder, group: RankGroup) -> None:
        self._model = model
        self._group = group
        self._sizes = np.diff(vocabulary_of(model, group)).tolist()

    def __call__(self, hidden: Float[Tensor, "r hidden"]) -> Float[Tensor, "r vocab"]:
        """Project hidden states; every rank must call it."""
        logits = self._model.uncapped_logits(hidden)
        room = max(self._sizes) - logits.shape[-1]
        parts = self._group.gather(functional.pad(logits, (0, room)) if room else logits)
        if not parts:
            return logits[:, :0]
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], dim=-1)


def vocabulary_of(model: Decoder, group: RankGroup | None) -> list[int]:
    """Return the first token id of each rank's vocabulary shard, then the vocabulary size."""
    ranks = 1 if group is None else group.place.ranks
    return [
        *(TensorParallelRank(rank, ranks).part(model.config.vocab_size).start for rank in range(ranks)),
        model.config.vocab_size,
    ]


def join_ranks(model: Decoder, whole: DecoderConfig, group: RankGroup) -> None:
    """Insert the collectives into a rank's shard of a decoder, in place.

    Args:
        model: built from `tensor_slices.sliced_config(whole, …)`, with this rank's weights.
        whole: config of the unsharded model.
    """
    first = group.place.part(whole.vocab_size).start
    is_whole = whole.family.qk_norm == "whole"
    model.embed = SummedEmbedding(model.embed, group, first=first)  # type: ignore[assignment]
    for block in model.layers:
        for of, owner in block.named_children():
            if last := {"attention": "output", "mlp": "down"}.get(of):
                setattr(owner, last, SummedLinear(owner.get_submodule(last), group))
            if of == "attention" and is_whole:
                owner.mean_squares = GroupMeans(group)  # type: ignore[assignment]
    model.config = replace(model.config, vocab_size=whole.vocab_size)

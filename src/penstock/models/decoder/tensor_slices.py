"""Tensor-parallel slices of a decoder: each rank's part of each matrix; no torch.

Query, key, value, gate and up are split by output: a rank has whole heads and neurons. Output and down are
split by input, so that the ranks' results are partial sums (Shoeybi et al., "Megatron-LM", arXiv:1909.08053).
Embedding and output matrix are split by rows of the vocabulary. Norms of queries and keys over all heads, and
attention sinks, are split as the heads are. Other norms, and biases after a sum, are whole on every rank.

With more ranks than key-value heads, the ranks whose queries read the same head each hold it: every rank that
reads a KV cache writes its own, because gathering heads at each step would cost a message per layer. So a
rank's shard is itself a decoder, with fewer heads and neurons, and is loaded as any other.
"""

from dataclasses import dataclass, replace

from penstock.core.errors import UsageError
from penstock.models.decoder.config import DecoderConfig

_HEADS = ("query", "key", "value")
_HEAD_NORMS = ("query_norm", "key_norm")
_NEURONS = ("gate", "up")


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """One tensor-parallel rank, and the number of ranks."""

    rank: int = 0
    ranks: int = 1

    def part(self, count: int) -> range:
        """Return this rank's part of `count` items in order; parts differ by one at most.

        >>> [TensorParallelRank(rank, 3).part(8) for rank in range(3)]
        [range(0, 2), range(2, 5), range(5, 8)]
        """
        return range(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)


ALONE = TensorParallelRank()
"""The only rank: it has every layer whole."""

Slice = tuple[int, range]
"""Dim (0 for rows, 1 for columns) and range."""


def check_ranks(config: DecoderConfig, ranks: int) -> None:
    """Refuse a number of ranks over which the model cannot be split.

    Raises:
        UsageError: the number of ranks does not divide the heads.
    """
    heads, shared = config.num_attention_heads, config.key_value_heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
    if ranks not in fits:
        raise UsageError(
            f"A model of {heads} query heads and {shared} key-value heads cannot be split over so many ranks",
            got=ranks,
            fix=f"Set tensor_parallel to {' or '.join(map(str, fits))}.",
        )


def sliced_config(config: DecoderConfig, place: TensorParallelRank) -> DecoderConfig:
    """Return the config of a rank's shard."""
    if place.ranks == 1:
        return config
    return replace(
        config,
        head_dim=config.size_of_head,
        num_attention_heads=config.num_attention_heads // place.ranks,
        num_key_value_heads=max(1, config.key_value_heads // place.ranks),
        intermediate_size=len(place.part(config.intermediate_size)),
        vocab_size=len(place.part(config.vocab_size)),
    )


def slice_of(name: str, config: DecoderConfig, place: TensorParallelRank) -> Slice | None:
    """Return a rank's rows or columns of a weight or bias; None: all of it.

    Args:
        name: parameter name in the unsharded decoder, `config`.

    >>> config = DecoderConfig(
    ...     vocab_size=9, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=4
    ... )
    >>> slice_of("layers.0.attention.query.weight", config, TensorParallelRank(1, 2))
    (0, range(4, 8))
    >>> slice_of("layers.0.mlp.down.weight", config, TensorParallelRank(1, 2))
    (1, range(3, 6))
    >>> slice_of("layers.0.mlp.down.bias", config, TensorParallelRank(1, 2))
    """
    if place.ranks == 1:
        return None
    *_, layer, kind = name.split(".")
    if layer in ("embed", "unembed"):
        return 0, place.part(config.vocab_size)
    if layer in _HEADS or (layer in _HEAD_NORMS and config.family.qk_norm == "whole"):
        count = config.num_attention_heads if layer.startswith("query") else config.key_value_heads
        return 0, _heads(count, config.size_of_head, place)
    if kind == "sinks":
        return 0, _heads(config.num_attention_heads, 1, place)
    if layer in _NEURONS:
        return 0, place.part(config.intermediate_size)
    if kind == "weight" and layer == "output":
        return 1, _heads(config.num_attention_heads, config.size_of_head, place)
    if kind == "weight" and layer == "down":
        return 1, place.part(config.intermediate_size)
    return None


def _heads(count: int, head_dim: int, place: TensorParallelRank) -> range:
    """Return the rows of a rank's heads; all rows of a head that several ranks share."""
    first, each = place.rank * count // place.ranks, max(1, count // place.ranks)
    return range(first * head_dim, (first + each) * head_dim)

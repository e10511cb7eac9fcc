"""Which part of each matrix of a decoder a rank computes with, when several share every layer; no torch.

Query, key, value, gate and up are cut by output: a rank has whole heads and whole neurons. Output and down
are cut by input, so that the results of the ranks are summands (Shoeybi et al., "Megatron-LM",
arXiv:1909.08053). The embedding and the output matrix are cut by rows of the vocabulary. Norms, and biases
that follow a sum, are whole on every rank.

With more ranks than key-value heads, ranks whose queries read the same head each hold it: a cache is
written for every rank that reads it, and the alternative, to gather heads each step, costs a message a layer.
So a rank's part of a decoder is itself a decoder, with fewer heads and neurons, and loads as any other.
"""

from dataclasses import dataclass, replace

from penstock.core.errors import UsageError
from penstock.models.llama.config import LlamaConfig

_HEADS = ("query", "key", "value")
_NEURONS = ("gate", "up")


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of those that share each layer."""

    rank: int = 0
    ranks: int = 1

    def part(self, count: int) -> range:
        """Return this rank's part of `count` things in order; parts differ by one at most.

        >>> [Place(rank, 3).part(8) for rank in range(3)]
        [range(0, 2), range(2, 5), range(5, 8)]
        """
        return range(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)


ALONE = Place()
"""A rank that has all of every layer."""

Slice = tuple[int, range]
"""A dim, 0 for rows and 1 for columns, and a run of it."""


def check_ranks(config: LlamaConfig, ranks: int) -> None:
    """Refuse a number of ranks over which the model cannot be cut.

    Raises:
        UsageError: it does not divide the heads.
    """
    heads, shared = config.num_attention_heads, config.key_value_heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
    if ranks not in fits:
        raise UsageError(
            f"A model of {heads} query heads and {shared} key-value heads cannot be cut over so many ranks",
            got=ranks,
            fix=f"Set tensor_parallel to {' or '.join(map(str, fits))}.",
        )


def sliced_config(config: LlamaConfig, place: Place) -> LlamaConfig:
    """Return the decoder that a rank's part is."""
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


def slice_of(name: str, config: LlamaConfig, place: Place) -> Slice | None:
    """Return which rows or columns of a weight or bias a rank has; None: all of it.

    Args:
        name: a parameter of the whole decoder, `config`.

    >>> config = LlamaConfig(
    ...     vocab_size=9, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=4
    ... )
    >>> slice_of("layers.0.attention.query.weight", config, Place(1, 2))
    (0, range(4, 8))
    >>> slice_of("layers.0.mlp.down.weight", config, Place(1, 2))
    (1, range(3, 6))
    >>> slice_of("layers.0.mlp.down.bias", config, Place(1, 2))
    """
    if place.ranks == 1:
        return None
    *_, layer, kind = name.split(".")
    if layer in ("embed", "unembed"):
        return 0, place.part(config.vocab_size)
    if layer in _HEADS:
        count = config.num_attention_heads if layer == "query" else config.key_value_heads
        return 0, _heads(count, config.size_of_head, place)
    if layer in _NEURONS:
        return 0, place.part(config.intermediate_size)
    if kind == "weight" and layer == "output":
        return 1, _heads(config.num_attention_heads, config.size_of_head, place)
    if kind == "weight" and layer == "down":
        return 1, place.part(config.intermediate_size)
    return None


def _heads(count: int, head_dim: int, place: Place) -> range:
    """Return the rows of a rank's heads; of a head that several share, all its rows."""
    first, each = place.rank * count // place.ranks, max(1, count // place.ranks)
    return range(first * head_dim, (first + each) * head_dim)

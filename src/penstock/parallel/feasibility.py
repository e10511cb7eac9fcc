"""Feasibility of a layout: whether the degrees fit a model, and which would; no torch."""

from collections.abc import Iterable
from typing import Protocol

from penstock.core.errors import ConfigError
from penstock.parallel.layout import ParallelConfig


class Shape(Protocol):
    """Fields of a model config that restrict the degrees."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def size_of_head(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102


def check_fit(config: ParallelConfig, shape: Shape, *, lengths: Iterable[int]) -> None:
    """Raise for degrees that do not divide what they split.

    Args:
        lengths: all row lengths of the run, in tokens.

    Raises:
        ConfigError: with degrees or sizes that would fit.
    """
    _check_stages(config, shape)
    _check_tensor(config.tensor, shape)
    _check_exchange(config, shape)
    for length in lengths:
        _check_length(config, length)


def _check_stages(config: ParallelConfig, shape: Shape) -> None:
    degree, blocks = config.pipeline, shape.num_hidden_layers
    if degree * config.stages_per_rank > blocks:
        raise ConfigError(
            f"parallel.pipeline x parallel.stages_per_rank are {degree * config.stages_per_rank} stages, and "
            f"the model has only {blocks} blocks",
            fix=f"Use at most {blocks} stages.",
        )


def _check_tensor(degree: int, shape: Shape) -> None:
    cut = {
        "model.num_attention_heads": shape.num_attention_heads,
        "model.intermediate_size": shape.intermediate_size,
    }
    fitting = [d for d in _common(cut.values()) if _shares_heads(d, shape)]
    fix = f"Use one of {_shown(fitting)}, the divisors of heads and neurons."
    for name, size in cut.items():
        if size % degree:
            raise ConfigError(f"parallel.tensor does not divide {name} {size}", got=degree, fix=fix)
    if not _shares_heads(degree, shape):
        raise ConfigError(
            f"parallel.tensor neither divides model.num_key_value_heads {shape.key_value_heads} nor can its "
            f"ranks share a head (heads of {shape.size_of_head})",
            got=degree,
            fix=fix,
        )
    if shape.vocab_size % degree:
        padded = -(-shape.vocab_size // degree) * degree
        raise ConfigError(
            f"parallel.tensor does not divide model.vocab_size {shape.vocab_size}",
            got=degree,
            fix=f"Set model.vocab_size to {padded}: unused rows do no harm.",
        )


def _shares_heads(degree: int, shape: Shape) -> bool:
    """True if each rank gets whole key-value heads, or several ranks share one evenly."""
    heads = shape.key_value_heads
    return heads % degree == 0 or (degree % heads == 0 and shape.size_of_head % (degree // heads) == 0)


def _check_exchange(config: ParallelConfig, shape: Shape) -> None:
    heads = shape.num_attention_heads // config.tensor
    if config.context_rule == "ulysses" and heads % config.context:
        each = f" on each of {config.tensor} tensor ranks" if config.tensor > 1 else ""
        raise ConfigError(
            f"parallel.context does not divide the {heads} query heads{each}, which ulysses exchanges",
            got=config.context,
            fix=f"Use one of {_shown(_common([heads]))}, or parallel.context_rule = 'all_gather'.",
        )


def _check_length(config: ParallelConfig, length: int) -> None:
    parts = config.context * config.tensor
    if length % parts:
        lower = length // parts * parts
        raise ConfigError(
            f"Rows of {length} tokens do not divide into {parts} parts (parallel.context {config.context} "
            f"x parallel.tensor {config.tensor})",
            fix=f"Use a sequence length of {f'{lower} or ' if lower else ''}{lower + parts}.",
        )


def _common(sizes: Iterable[int]) -> list[int]:
    several = list(sizes)
    return [d for d in range(1, min(several) + 1) if not any(size % d for size in several)]


def _shown(degrees: list[int]) -> str:
    return ", ".join(map(str, degrees))

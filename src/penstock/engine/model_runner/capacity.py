"""Capacity of an engine: KV cache blocks and tokens per step, from the free memory; no torch.

The cache is the only large allocation after the weights, so the memory that is free once they are loaded
bounds it. On a CPU half of that is used: other programs and activations need some, and pages are not touched
before they are used. More than `max_sequences` whole contexts is never needed.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.core.units import mib


def step_tokens(device: str, *, asked: int | None, max_sequences: int, num_drafts: int) -> int:
    """Return the token limit of a step: `asked`, else enough for every running sequence.

    >>> step_tokens("cpu", asked=None, max_sequences=256, num_drafts=4)
    4096
    """
    if asked is not None:
        return asked
    return max(defaults_of(device).step_tokens, max_sequences * (1 + num_drafts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Defaults of one kind of device."""

    share_of_free: float
    """Share of the memory that is free after the weights are loaded and, on a GPU, after a trial step."""
    step_tokens: int
    """Tokens for which activation memory is planned; `scheduling.budget` decides how many a step uses."""
    piece_tokens: int
    """Prefill chunk of a single prompt: enough rows for GEMMs to run at full speed."""


_CPU = Defaults(share_of_free=0.5, step_tokens=4096, piece_tokens=512)
_ACCELERATOR = Defaults(share_of_free=0.9, step_tokens=8192, piece_tokens=2048)


def defaults_of(device: str) -> Defaults:
    """Return the defaults of a torch device type.

    >>> defaults_of("cpu").piece_tokens, defaults_of("xpu").piece_tokens
    (512, 2048)
    """
    return _CPU if device == "cpu" else _ACCELERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Sizes of the KV cache and of a step."""

    context: int
    """Maximum tokens of prompt and answer together."""
    vocab_size: int
    """Number of token ids."""
    num_blocks: int
    """Blocks of the KV cache."""
    block_size: int
    """Positions per block."""
    tokens_per_step: int
    """Maximum tokens computed in one step."""
    max_sequences: int
    """Maximum number of running sequences."""


def num_blocks_for(
    free_bytes: int, *, block_bytes: int, blocks_of: Callable[[int], int], context: int, max_sequences: int
) -> int:
    """Return the number of blocks that fit, at most as many as `max_sequences` contexts need.

    Args:
        blocks_of: returns the blocks of a sequence of so many tokens, over all cache groups.

    Raises:
        ConfigError: not even one context fits.

    >>> num_blocks_for(1000, block_bytes=10, blocks_of=lambda n: -(-n // 4), context=32, max_sequences=2)
    16
    """
    per_context = blocks_of(context)
    fitting = free_bytes // block_bytes
    if fitting < per_context:
        tokens = bisect_right(range(context), fitting, key=blocks_of) - 1
        shorter = f"Set max_context (--max-context) to at most {tokens:,}, or give" if tokens else "Give"
        raise ConfigError(
            f"The cache has no room for one context: {context:,} tokens are {per_context:,} blocks of "
            f"{mib(block_bytes)}, {mib(per_context * block_bytes)} in total",
            got=mib(free_bytes),
            fix=f"{shorter} the cache more memory (--cache-gib).",
        )
    return min(fitting, per_context * max_sequences)

"""How many blocks and how many tokens a step, from the memory that is free; no torch.

The cache is the only large thing allocated after the weights, so what is free when they are loaded bounds it.
On a CPU half of that is taken: the machine is not ours alone, activations need some, and the pages are not
touched before they are used. More than `max_sequences` whole contexts is never of use.
"""

from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.core.units import mib

SHARE_OF_FREE = {"cpu": 0.5, "cuda": 0.9}
"""Of the memory that is free once weights are loaded and, on a GPU, a step was tried."""

STEP_TOKENS = {"cpu": 4096, "cuda": 8192}
"""What memory for activations is planned for; what a step lasts says `scheduling.step_size`."""
PIECE_TOKENS = {"cpu": 512, "cuda": 2048}
"""Of a prompt that is alone: enough rows for matrix products to run at full speed, no more than needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an engine has room for."""

    context: int
    """Tokens of prompt and answer at most."""
    vocab_size: int
    """Tokens are below this."""
    num_blocks: int
    """Blocks of the cache."""
    block_size: int
    """Positions of a block."""
    tokens_per_step: int
    """Tokens computed in one step at most."""
    max_sequences: int
    """Answers in the making at once."""


def step_tokens(device: str, *, asked: int | None, max_sequences: int, num_drafts: int) -> int:
    """Return how many tokens a step may compute: what was asked, else enough for every answer to go on.

    >>> step_tokens("cpu", asked=None, max_sequences=256, num_drafts=4)
    4096
    """
    if asked is not None:
        return asked
    return max(STEP_TOKENS[device], max_sequences * (1 + num_drafts))


def num_blocks_for(
    free_bytes: int, *, block_bytes: int, block_size: int, context: int, max_sequences: int
) -> int:
    """Return how many blocks fit, no more than are of use.

    Raises:
        ConfigError: not even one context fits.

    >>> num_blocks_for(1000, block_bytes=10, block_size=4, context=32, max_sequences=2)
    16
    """
    per_context = -(-context // block_size)
    fitting = free_bytes // block_bytes
    if fitting < per_context:
        tokens = fitting * block_size
        shorter = f"Set max_context (--max-context) to at most {tokens:,}, or give" if tokens else "Give"
        raise ConfigError(
            f"The cache has no room for one context: {context:,} tokens are {per_context:,} blocks of "
            f"{mib(block_bytes)}, {mib(per_context * block_bytes)} in sum",
            got=mib(free_bytes),
            fix=f"{shorter} the cache more memory (--cache-gib).",
        )
    return min(fitting, per_context * max_sequences)

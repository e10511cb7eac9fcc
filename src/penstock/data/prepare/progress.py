"""What a preparation tells its caller while it works."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a preparation has come; counts include what earlier runs did."""

    stage: str
    """What is being done now."""
    done_bytes: int = 0
    """Input bytes read, compressed ones as stored."""
    total_bytes: int = 0
    """Input bytes of the whole plan."""
    tokens: int = 0
    """Tokens made."""
    documents: int = 0
    """Documents accepted."""
    shards: int = 0
    """Shards on disk; a stop now costs the work since the last of them."""
    rejected: int = 0
    """Inputs rejected."""


OnProgress = Callable[[Progress], None]

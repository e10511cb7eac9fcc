"""Say from the ranks' last words which of them stopped where; pure.

The rank that the others wait for has begun the fewest collectives; those who wait may differ by one, for a
collective can be over for some of its ranks. Or it wrote nothing at all: then its process is frozen, gone,
or cut off from the others. Stages of a pipeline begin different numbers of collectives; of those, compare
ranks of one stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """Where a rank was when the run hung; what it wrote into its file."""

    rank: int
    host: str
    pid: int
    at: float
    """When, in seconds since 1970."""
    step: int
    """Steps it has taken, the one it is in counted."""
    doing: str
    """What it had begun."""
    num_collectives: int
    """Collectives it has begun so far."""
    last_collective: str
    """The last one's name; "" before the first."""
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Thread -> its calls, the innermost last."""


def diagnose(words: Sequence[LastWords], *, world_size: int, waited_s: float) -> str:
    """Return a paragraph that names the rank to look at, and where it is.

    Args:
        words: of the ranks that could speak; one at least.
    """
    spoke = {each.rank for each in words}
    silent = [rank for rank in range(world_size) if rank not in spoke]
    most = max(words, key=lambda each: (each.num_collectives, -each.rank))
    fewest = min(each.num_collectives for each in words)
    # With a silent rank, a difference between the others is only how far its last collective had come.
    culprits = [] if silent else [each for each in words if each.num_collectives < most.num_collectives]
    culprits = [each for each in culprits if each.num_collectives == fewest]
    waiting = sorted(spoke - {each.rank for each in culprits})
    lines = [f"No step was finished for {waited_s:,.0f} s."]
    if silent or culprits:
        lines.append(
            f"{_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in step {most.step} "
            f"({most.doing}) for {most.last_collective or 'the others'}, collective {most.num_collectives}."
        )
    else:
        lines.append(
            f"All ranks have begun the same {most.num_collectives} collectives: the last, "
            f"{most.last_collective or 'none'}, does not end. Look at the network between the machines. "
            f"Rank {most.rank} is in step {most.step} ({most.doing}), at {_innermost(most)}."
        )
    if silent:
        lines.append(f"{_ranks(silent)} wrote nothing: frozen, gone, or cut off from the run's folder.")
    lines += [
        f"Rank {each.rank} on {each.host} (pid {each.pid}) has begun {each.num_collectives} collectives; "
        f"it is in step {each.step} ({each.doing}), at {_innermost(each)}."
        for each in culprits[:_MOST_NAMED]
    ]
    return " ".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED:,} more" if len(ranks) > _MOST_NAMED else ""
    return f"Rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _innermost(words: LastWords) -> str:
    calls = words.stacks.get("MainThread") or [""]
    return calls[-1] or "an unknown place"

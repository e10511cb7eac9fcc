"""Hang report: from the ranks' last state to the rank that hangs, and where; pure.

The rank that the others wait for has started the fewest collectives; the waiting ranks may differ by one,
because a collective can complete on some of its ranks first. A rank without a file is frozen, dead or cut off
from the run's folder. Pipeline stages start different numbers of collectives: compare ranks of one stage.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from penstock.core import config
from penstock.core.errors import ConfigError

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """State of a rank when the run hung, from its file."""

    rank: int
    host: str
    pid: int
    at: float
    """Unix time in seconds."""
    step: int
    """Number of the present step, from 1."""
    doing: str
    """Present activity."""
    num_collectives: int
    """Collectives started so far."""
    last_collective: str
    """Name of the last collective; "": none."""
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Thread -> its call stack, innermost last."""


def read_words(content: bytes) -> LastWords:
    """Return the state in a rank's file.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"It is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError("It must contain a JSON object", got=type(record).__name__)
    record.pop("collectives", None)
    return config.build(LastWords, record)


def diagnose(
    words: Sequence[LastWords],
    *,
    world_size: int,
    unread: Collection[int] = (),
    waited_s: float | None = None,
) -> str:
    """Return a paragraph that names the rank to look at, and its position.

    Args:
        words: states of the ranks that wrote one; at least one.
        unread: ranks that wrote a state which could not be read. They are not blamed.
        waited_s: seconds without a finished step; None: unknown.
    """
    spoke = {each.rank for each in words}
    unknown = [rank for rank in range(world_size) if rank in unread and rank not in spoke]
    silent = [rank for rank in range(world_size) if rank not in spoke and rank not in unread]
    most = max(words, key=lambda each: (each.num_collectives, -each.rank))
    fewest = min(each.num_collectives for each in words)
    # with a silent rank, the others differ only in how far their last collective had come
    culprits = [] if silent else [each for each in words if each.num_collectives < most.num_collectives]
    culprits = [each for each in culprits if each.num_collectives == fewest]
    waiting = sorted(spoke - {each.rank for each in culprits})
    lines = [] if waited_s is None else [f"No step was finished for {waited_s:,.0f} s."]
    if silent or culprits:
        lines.append(
            f"{named_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in step {most.step} "
            f"({most.doing}) for {most.last_collective or 'the others'}, collective {most.num_collectives}."
        )
    else:
        lines.append(
            f"{'All ranks' if not unknown else 'All other ranks'} have begun the same "
            f"{most.num_collectives} collectives: the last, "
            f"{most.last_collective or 'none'}, does not end. Look at the network between the machines. "
            f"Rank {most.rank} is in step {most.step} ({most.doing}), at {_innermost(most)}."
        )
    if silent:
        lines.append(f"{named_ranks(silent)} wrote nothing: frozen, dead, or cut off from the run's folder.")
    if unknown:
        them = "it" if len(unknown) == 1 else "them"
        lines.append(f"{named_ranks(unknown)} wrote what was not read: the others may wait for {them}.")
    lines += [
        f"Rank {each.rank} on {each.host} (pid {each.pid}) has begun {each.num_collectives} collectives; "
        f"it is in step {each.step} ({each.doing}), at {_innermost(each)}."
        for each in culprits[:_MAX_NAMED]
    ]
    return " ".join(lines)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return the words for some ranks, at least one: "Ranks 0, 2"; after eight, how many more."""
    shown = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED:,} more" if len(ranks) > _MAX_NAMED else ""
    return f"Rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _innermost(words: LastWords) -> str:
    calls = words.stacks.get("MainThread") or [""]
    return calls[-1] or "an unknown place"

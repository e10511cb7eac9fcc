"""What went wrong in a run, as tables of its page: steps that were not taken, ranks that were waited for."""

from penstock.core.units import plural
from penstock.obs.history import History
from penstock.obs.table import section

_MOST_STEPS = 50
_MOST_RANKS = 8
_SLOW = 1.2
"""Times the median from which on a slow rank is worth a line: some rank is always the slowest."""


def trouble(history: History) -> str:
    """Return the sections; nothing of a run without trouble."""
    return _skipped(history) + _slow(history)


def _skipped(history: History) -> str:
    if not history.skipped:
        return ""
    left_out = len(history.skipped) - _MOST_STEPS
    title = f"{plural(len(history.skipped), 'step')} not taken" + (
        f", the last {_MOST_STEPS}" if left_out > 0 else ""
    )
    rows = [(f"{skipped.step:,}", skipped.why) for skipped in history.skipped[-_MOST_STEPS:]]
    return section(title, ("step", "why"), rows)


def _slow(history: History) -> str:
    slow = {rank: found for rank, found in history.slowest.items() if found.ratio >= _SLOW}
    worst = sorted(slow, key=lambda rank: -slow[rank].ratio)[:_MOST_RANKS]
    if not worst:
        return ""
    comparisons = sum(found.times for found in history.slowest.values())
    rows = [
        (str(rank), f"{slow[rank].times:,} of {comparisons:,}", f"{slow[rank].ratio:.2f}") for rank in worst
    ]
    return section(
        "Ranks the others waited for",
        ("rank", "slowest in comparisons", "times the median rank's time"),
        rows,
    )

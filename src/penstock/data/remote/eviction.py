"""Which files of a full cache go: those whose next use is farthest away, where that is known.

The order of training is a function, so the next use of a stretch of a corpus is known exactly, and evicting
the farthest is then the best that any cache can do (Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5, 1966). Files that no one here can speak for, such as another
run's, go by least recent use.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

IDLE_S = 900.0
"""Age after which a file that no one speaks for goes before any that is known to be needed again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache."""

    path: Path
    disk_bytes: int
    """What deleting it frees."""
    age_s: float
    """Since its last use, as far as its time tells."""
    next_use: float | None = None
    """Samples until its next use, infinity for never; None where this process cannot tell."""


def victims(entries: Iterable[Entry], *, excess_bytes: int) -> list[Entry]:
    """Return the files to delete, first to go first, that together free at least `excess_bytes`.

    >>> near, far = Entry(Path("a"), 10, 0.0, 5.0), Entry(Path("b"), 10, 0.0, 900.0)
    >>> [entry.path.name for entry in victims([near, far], excess_bytes=10)]
    ['b']
    """
    doomed = []
    for entry in sorted(entries, key=_rank):
        if excess_bytes <= 0:
            break
        doomed.append(entry)
        excess_bytes -= entry.disk_bytes
    return doomed


def _rank(entry: Entry) -> tuple[int, float, str]:
    """Sort first what goes first: idle and unknown, then known and far, then unknown and lately used."""
    name = f"{entry.path.parent.name}/{entry.path.name}"  # ties go the same way in every process
    if entry.next_use is None:
        return (0 if entry.age_s > IDLE_S else 2), -entry.age_s, name
    return 1, -entry.next_use, name

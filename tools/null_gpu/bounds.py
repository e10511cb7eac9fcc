"""Bounds on what the null GPU counts: read from bounds.toml, judged without torch."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

TABLE = Path(__file__).parent / "bounds.toml"

Counts = Mapping[str, Mapping[str, Any]]  # Any: a number; or a table, on which there is no bound
"""Program -> name of a count -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One row of the table."""

    of: str
    """Name of a program; * stands for anything."""
    count: str
    why: str
    at_most: float | None = None
    than: str = ""
    times: float = 1.0
    plus: float = 0.0
    """`at_most` is this many times the count of `than`, plus this."""
    now: float | None = None
    """What is allowed until the bound is reached."""

    def limit(self, counts: Counts) -> float:
        """Return the bound.

        Raises:
            KeyError: it is that of a program that was not counted.
        """
        return (
            self.at_most
            if self.at_most is not None
            else self.times * counts[self.than][self.count] + self.plus
        )


@dataclass(frozen=True, slots=True)
class Judged:
    """A count beside its bound."""

    of: str
    count: str
    value: float
    limit: float
    now: float | None
    why: str

    @property
    def allowed(self) -> float:
        """The largest value that is allowed today."""
        return self.limit if self.now is None else max(self.limit, self.now)

    @property
    def is_within(self) -> bool:
        """True if the count is allowed today."""
        return self.value <= self.allowed

    @property
    def is_reached(self) -> bool:
        """True if the count is within the bound itself."""
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Table:
    """The bounds, and the sources whose change makes a filed result too old."""

    bounds: tuple[Bound, ...]
    sources: tuple[str, ...]
    kit_sources: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the table.

        Raises:
            TypeError: a key of a bound is unknown or missing.
        """
        found = tomllib.loads(text)
        bounds = tuple(Bound(**row) for row in found["bound"])
        return cls(bounds, tuple(found["sources"]), tuple(found["kit_sources"]))


def judge(bounds: Sequence[Bound], counts: Counts) -> tuple[list[Judged], list[str]]:
    """Return each count beside its bound, and what was to be counted and was not.

    >>> of_step = Bound(of="step *", count="waits", at_most=1, now=8, why="")
    >>> (judged,), missing = judge([of_step], {"step a": {"waits": 9, "launches": 5}})
    >>> judged.is_within, judged.is_reached, missing
    (False, False, [])
    >>> judge([of_step], {"loss": {"waits": 0}})
    ([], ['waits of step *'])
    """
    judged: list[Judged] = []
    taken: set[tuple[str, str]] = set()
    missing = []
    for bound in bounds:
        names = [name for name in counts if fnmatchcase(name, bound.of) and bound.count in counts[name]]
        if not names or (bound.than and bound.count not in counts.get(bound.than, {})):
            missing.append(f"{bound.count} of {bound.of}")
            continue
        for name in names:
            if (name, bound.count) not in taken:
                taken.add((name, bound.count))
                value, limit = counts[name][bound.count], bound.limit(counts)
                judged.append(Judged(name, bound.count, value, limit, bound.now, bound.why))
    return judged, missing

"""What a check says: green, yellow or red, a sentence, and the remedy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    GREEN = "green"
    """As it should be, or a fact to know."""
    YELLOW = "yellow"
    """A run works, and is slower or more fragile than it need be."""
    RED = "red"
    """A run fails, hangs, or is several times slower."""


_ORDER = (Level.GREEN, Level.YELLOW, Level.RED)

BETWEEN = -1
"""In place of a node's number: the finding is about what lies between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level
    what: str
    """A sentence without a full stop, with the value that was found."""
    remedy: str = ""
    """What to do; empty where nothing is to be done."""
    nodes: tuple[int, ...] = field(default=(BETWEEN,))
    """The nodes it was found on."""


def green(check: str, what: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(check=check, level=Level.GREEN, what=what)


def yellow(check: str, what: str, *, remedy: str) -> Finding:
    """Return a finding that costs speed or safety."""
    return Finding(check=check, level=Level.YELLOW, what=what, remedy=remedy)


def red(check: str, what: str, *, remedy: str) -> Finding:
    """Return a finding that a run does not survive."""
    return Finding(check=check, level=Level.RED, what=what, remedy=remedy)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of some findings.

    >>> worst([green("a", "fine"), yellow("b", "odd", remedy="mend")]).value
    'yellow'
    """
    return max((finding.level for finding in findings), key=_ORDER.index, default=Level.GREEN)


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings in their order, those that say the same of several nodes as one.

    >>> a, b = (replace(green("torch", "torch 2.13"), nodes=(node,)) for node in (0, 1))
    >>> [finding.nodes for finding in merged([a, b])]
    [(0, 1)]
    """
    nodes: dict[Finding, list[int]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    return [replace(finding, nodes=tuple(dict.fromkeys(where))) for finding, where in nodes.items()]

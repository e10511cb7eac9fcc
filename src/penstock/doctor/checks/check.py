"""Check interface: `measure` returns facts, `judge` turns them into findings with remedies.

A check is a module of this package with `measure` and `judge`. `measure` examines the machine and returns
facts: numbers and names, no open resources. `judge` is pure: every threshold is tested with made-up facts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of the doctor."""

    folder: Path
    """Measure the disk of this folder."""
    corpus: str = ""
    """Measure the loader on this corpus."""
    store: str = ""
    """Measure an object store below s3://, gs:// or az://; what is written there is deleted."""
    only: tuple[str, ...] = ()
    """Names of the checks to run; empty: all."""
    expected_gpus: int | None = None
    """NVIDIA GPUs that each machine should have; None: those on its PCI bus."""
    num_nodes: int = 1
    """Number of machines of the run: with one, the network does not matter."""
    networks: tuple[str, ...] = ()
    """Measure links over this interface of every machine; empty: all that lead out."""
    links_s: float = 60.0
    """Time limit for measuring links.

    All other checks have limits of their own."""


class Level(StrEnum):
    """Severity of a finding."""

    GREEN = "green"
    """Sound, or for information."""
    YELLOW = "yellow"
    """A run works, but slower or less robustly than it could."""
    RED = "red"
    """A run fails, hangs, or is several times slower."""


BETWEEN = -1
"""Used instead of a node's number: the finding is about the network between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Line of the report."""

    level: Level
    what: str
    """Sentence without a full stop, with the measured value."""
    check: str = ""
    """Empty: the check that is judged, which `of_check` names."""
    remedy: str = ""
    """Remedy; empty if nothing has to be done."""
    nodes: tuple[int, ...] = field(default=(BETWEEN,))
    """Nodes with this finding."""


class Check(Protocol):
    """Module that measures one aspect and judges it."""

    def measure(self, options: CheckOptions) -> Any:  # Any: each check has its own facts
        """Examine this machine and return facts.

        Raises:
            PenstockError: a requested measurement is impossible; it becomes a red line.
        """

    def judge(self, facts: Any) -> Iterator[Finding]:
        """Yield at least one finding about the facts."""


_ORDER = (Level.GREEN, Level.YELLOW, Level.RED)


def green(what: str, *, check: str = "") -> Finding:
    """Return a finding without a remedy."""
    return Finding(check=check, level=Level.GREEN, what=what)


def yellow(what: str, *, remedy: str, check: str = "") -> Finding:
    """Return a finding that costs speed or robustness."""
    return Finding(check=check, level=Level.YELLOW, what=what, remedy=remedy)


def red(what: str, *, remedy: str, check: str = "") -> Finding:
    """Return a finding that makes a run fail."""
    return Finding(check=check, level=Level.RED, what=what, remedy=remedy)


def of_check(check: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a check with its name, but for those that name another."""
    return [finding if finding.check else replace(finding, check=check) for finding in findings]


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of some findings.

    >>> worst([green("fine"), yellow("odd", remedy="mend")]).value
    'yellow'
    """
    return max((finding.level for finding in findings), key=_ORDER.index, default=Level.GREEN)


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings in their order, equal ones of several nodes merged.

    >>> a, b = (replace(green("torch 2.13"), nodes=(node,)) for node in (0, 1))
    >>> [finding.nodes for finding in merged([a, b])]
    [(0, 1)]
    """
    nodes: dict[Finding, list[int]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    return [replace(finding, nodes=tuple(dict.fromkeys(where))) for finding, where in nodes.items()]

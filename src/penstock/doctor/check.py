"""What every check is: something that measures, and something that judges what was measured.

A check is a module of this package with `measure` and `judge`. `measure` looks at the machine and returns
facts: numbers and names, nothing opened. `judge` is pure: every threshold is tested with made-up facts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.doctor.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for."""

    folder: Path
    """Where the speed of the disk is measured and its free space read."""
    corpus: str = ""
    """Corpus whose loading is measured; empty: none."""
    store: str = ""
    """Address in an object store below which something is written, read and deleted; empty: none."""
    num_nodes: int = 1
    """Machines of the run: with one, the network does not matter."""
    seconds: float = 60.0
    """Bound on the time for links between nodes. Everything else is bounded by itself."""


class Check(Protocol):
    """A module that measures one thing and judges it."""

    def measure(self, asked: Asked) -> Any:  # Any: each check has its own facts
        """Look at this machine.

        Raises:
            PenstockError: what was asked for cannot be measured; it becomes a red line.
        """

    def judge(self, facts: Any) -> Iterator[Finding]:
        """Say what is good or bad about the facts, one line at least."""

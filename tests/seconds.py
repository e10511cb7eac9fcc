"""How long each test takes: kept in seconds.json, by which the workers are given the long files first.

`pytest --update-seconds` writes the file anew from a run of everything.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

KEPT = Path(__file__).with_suffix(".json")
_MIN_S = 0.1  # a test that takes less is counted with its file alone
_REST = "the rest"
_SLOWEST = 20


class Seconds:
    """Adds up the seconds of each test function, over its parameters, set-up and tear-down included."""

    def __init__(self, update: bool):
        self._update = update
        self._kept: dict[str, dict[str, float]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        self._taken: dict[str, Counter[str]] = {}

    def expected(self, item: pytest.Item) -> float:
        """Return the seconds that the item's file took as kept; a new file comes first."""
        kept = self._kept.get(item.nodeid.partition("::")[0])
        return sum(kept.values()) if kept is not None else float("inf")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.partition("::")
        self._taken.setdefault(file, Counter())[test.partition("[")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"seconds: the {_SLOWEST} slowest tests, then each folder")
        tests = Counter(
            {f"{file}::{test}": took for file, of in self._taken.items() for test, took in of.items()}
        )
        folders: Counter[str] = Counter()
        for file, of in self._taken.items():
            folders["/".join(file.split("/")[:2])] += sum(of.values())
        for name, took in [*tests.most_common(_SLOWEST), *folders.most_common()]:
            terminalreporter.write_line(f"{took:8.1f} {name}")
        if self._update:
            KEPT.write_text(
                json.dumps({file: _rounded(self._taken[file]) for file in sorted(self._taken)}, indent=0)
                + "\n"
            )


def _rounded(taken: Counter[str]) -> dict[str, float]:
    few = sum(took for took in taken.values() if took < _MIN_S)
    return {test: round(taken[test], 1) for test in sorted(taken) if taken[test] >= _MIN_S} | {
        "": round(few, 2)
    }

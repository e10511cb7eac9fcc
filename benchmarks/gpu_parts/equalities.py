"""Equalities of the GPU kit: what is computed on the device is what float64 or the CPU computes.

Runs the tests of tests/gpu under pytest, the most important files first, and files each as a row. A test that
ends the process, leaves the GPU unusable or takes too long fails, and the rest goes on in a fresh process.
Most of the time goes into compiling, so on a GPU groups of files run side by side, as far as there are cores.
Two cases divide the files: those of what is measured in the first command, and the others.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from gpu_parts.child import POISONED, run_child
from gpu_parts.instruments import run_cases
from gpu_parts.machine import is_null_gpu
from gpu_parts.part import Part, open_part
from penstock.core import clock

TESTS = Path(__file__).resolve().parents[2] / "tests" / "gpu"
GROUPS = {
    "equalities": (
        ("attention", "loss", "paged", "low_bit", "sampling", "float8"),
        ("training",),
        ("engine",),
    ),
    "equalities-others": (("optimizers", "checkpoint"), ("tuning",)),
}
"""Of each case the files of each group, in the order in which they run: what others rest on first. Files that
are not named run in the last group of the last case."""
INTERPRETED = ("paged", "low_bit", "float8")
"""Files of kernels in Triton, which decides on import if it interprets: on CPUs in a process of their own."""
TEST_S = {"cuda": 100.0, "cpu": 300.0}
"""Seconds that one test may take: it compiles kernels, or the C++ operators of a CPU for the first time."""
_CORES_OF_GROUP = 3
_ENOUGH_S = 5.0
"""Time in which another process is worth starting."""


class _OverTime(Exception):
    """A test took too long, or the part's time is over."""


def main() -> None:
    """Run the part."""
    part = open_part("equalities", __doc__.splitlines()[0])
    files = sorted(path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py"))
    run_cases(part, {case: partial(hold, part, grouped(case, files)) for case in GROUPS})


def hold(part: Part, groups: list[list[str]]) -> None:
    """Run the tests of some groups of files."""
    num_at_once = max(1, (os.cpu_count() or 1) // _CORES_OF_GROUP)
    is_cpu = part.device.type == "cpu"
    if is_cpu:
        num_at_once, files = 1, [name for group in groups for name in group]
        interpreted = [name for name in files if name in INTERPRETED]
        groups = [interpreted, [name for name in files if name not in INTERPRETED]]
    with tempfile.TemporaryDirectory() as folder:
        runs: list[Run] = []

        def expect() -> None:
            part.expect([name for run in runs for name in run.names()])

        for number, group in enumerate(groups):
            if group:
                record = Path(folder) / f"{number}.jsonl"
                runs.append(Run(part, group, TESTS, record, expect, is_cpu and number == 0))
        expect()
        with ThreadPoolExecutor(num_at_once) as pool:
            are_whole = list(pool.map(Run.to_the_end, runs))
        if not all(are_whole):
            part.cut("the time was over before all tests ran")


def grouped(case: str, files: list[str]) -> list[list[str]]:
    """Return the files of each group of a case, in the order in which they run.

    >>> grouped("equalities", ["training", "other", "paged", "attention", "checkpoint"])
    [['attention', 'paged'], ['training']]
    >>> grouped("equalities-others", ["training", "other", "paged", "attention", "checkpoint"])
    [['checkpoint'], ['other']]
    """
    groups = [list(group) for group in GROUPS[case]]
    if case == list(GROUPS)[-1]:
        named = {name for known in GROUPS.values() for group in known for name in group}
        groups[-1] += sorted(set(files) - named)
    found = ([name for name in group if name in files] for group in groups)
    return [group for group in found if group]


class Run:
    """The tests of some files, in one process and as many more as tests break.

    Args:
        files: names without `test_` and suffix.
        tests: the folder of the files.
        record: a file that does not exist yet, for what pytest says.
        expect: called when more is known of what is to come.
        is_interpreted: whether Triton's kernels are interpreted.
    """

    def __init__(
        self,
        part: Part,
        files: list[str],
        tests: Path,
        record: Path,
        expect: Callable[[], None],
        is_interpreted: bool = False,
    ) -> None:
        self._part, self._files, self._tests, self._record = part, files, tests, record
        self._expect, self._is_interpreted = expect, is_interpreted
        self._collected: list[str] = []
        self._broken: list[str] = []
        self._ended: set[str] = set()
        self._running = ""
        self._running_since = 0.0
        self._read_to = 0

    def names(self) -> list[str]:
        """Return the names of the rows to come: of tests, and of files until their tests are known."""
        if not self._collected and not self._broken:
            return [_of_file(name) for name in self._files]
        return [*map(_of_file, self._broken), *map(_name, self._collected)]

    def to_the_end(self) -> bool:
        """Run all; return False if the time was over before."""
        ids = [f"test_{name}.py" for name in self._files]
        while ids:
            if self._part.left_s() < _ENOUGH_S:
                return False
            self._running = ""
            why = self._process(ids)
            left = [test for test in self._collected if test not in self._ended]
            if self._running:
                self._fail(self._running, f"The process {why} during this test." if why else "Not ended.")
            elif not self._collected or left == ids:
                for name in left or [f"test_{name}.py" for name in self._files if name not in self._broken]:
                    self._fail(name, f"pytest {why or 'ended and ran nothing'}; its words are in the log.")
            ids = [test for test in left if test not in self._ended]
        return True

    def _process(self, ids: list[str]) -> str:
        """Run tests until they end, the process does or one is over time; return why it ended."""
        options = ["-c", str(self._tests / "pytest.ini"), "-p", "gpu_parts.pytest_rows", "--device"]
        options += [str(self._part.device), "--size", "tiny" if self._part.is_tiny else "full"]
        environment = {
            # Options of a pytest that started the kit are of plugins, and none are loaded here.
            **{name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
            "PENSTOCK_ROWS": str(self._record),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **({"TRITON_INTERPRET": "1"} if self._is_interpreted else {}),
        }
        self._running_since = clock.monotonic()
        try:
            why = run_child(
                [sys.executable, "-m", "pytest", *options, *(str(self._tests / name) for name in ids)],
                seconds=max(_ENOUGH_S, self._part.left_s()),
                log=None,
                environment=environment,
                meanwhile=self._look,
            )
        except _OverTime:
            why = f"was killed after {clock.monotonic() - self._running_since:.0f} s"
        self._read()
        return "lost the GPU" if why.endswith(f"code {POISONED}") else why

    def _look(self) -> None:
        self._read()
        device = "cpu" if is_null_gpu() else self._part.device.type
        if self._running and clock.monotonic() - self._running_since > TEST_S.get(device, 100.0):
            raise _OverTime

    def _read(self) -> None:
        """File what pytest has said since the last look."""
        if not self._record.exists():
            return
        with self._record.open() as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read_to += len(whole.encode())
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, record: dict[str, str]) -> None:
        if "collected" in record:
            self._collected = self._collected or list(record["collected"])
            self._expect()
        elif "broken" in record:
            name = Path(record["broken"]).stem.removeprefix("test_")
            if name not in self._broken:
                self._broken.append(name)
                self._row(_of_file(name), record["status"], record["why"])
        elif "began" in record:
            self._running, self._running_since = record["began"], clock.monotonic()
        else:
            self._running = ""
            self._ended.add(record["ended"])
            self._row(_name(record["ended"]), record["status"], record["why"])

    def _row(self, name: str, status: str, why: str) -> None:
        if status == "held":
            self._part.held(name)
        elif status == "not computed":
            self._part.not_computed(name)
        elif status == "skipped":
            self._part.skipped(name, why)
        else:
            self._part.failed(name, why)

    def _fail(self, test: str, why: str) -> None:
        self._ended.add(test)
        self._part.failed(_name(test), why)


def _name(test: str) -> str:
    """Return a test's id in words.

    >>> _name("test_paged.py::test_pages_of_8_bits[9-3]")
    'paged: pages of 8 bits [9-3]'
    >>> _name("test_paged.py")
    'paged: all of it'
    """
    file, _, rest = test.partition("::")
    if not rest:
        return _of_file(Path(file).stem.removeprefix("test_"))
    function, bracket, case = rest.partition("[")
    words = function.removeprefix("test_").replace("_", " ")
    return f"{Path(file).stem.removeprefix('test_')}: {words}{' ' * bool(bracket)}{bracket}{case}"


def _of_file(name: str) -> str:
    return f"{name}: all of it"


if __name__ == "__main__":
    main()

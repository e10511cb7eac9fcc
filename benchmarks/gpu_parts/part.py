"""One part of the GPU kit: its options, its cases and their time, and its rows, which are on disk at once.

Each part runs as a process of its own, so that a kernel which hangs or takes the driver down costs one case
and not the others. The file of a part is a JSON object: `part`, `rows`, `expected` (names), `is_done`, and
`cases`: name -> how it `ended` (`runs` until then) and its `expected` rows.
"""

import argparse
import contextlib
import faulthandler
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal

from gpu_parts.cases import CASES
from gpu_parts.machine import is_null_gpu
from penstock.core import clock
from penstock.core.files import write_atomic

if TYPE_CHECKING:  # the kit reads what parts filed, and starts without torch
    import torch

DONE, RUNS = "done", "runs"
_HANGS_AFTER_S = 2.0
NOT_COMPUTED: Literal["not computed"] = "not computed"
Status = Literal["held", "failed", "skipped", "measured", "not computed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One equality or one figure."""

    name: str
    """Such as `train 1b bfloat16 compiled: tokens/s`; unique within its part."""
    status: Status
    """Of an equality: held or failed. Of a figure: measured or failed. Of both: skipped, or on the null GPU
    not computed."""
    value: float | None = None
    unit: str = ""
    target: float | None = None
    """What the value should reach, if anything."""
    is_met: bool | None = None
    """True if the value reached its target; None without one."""
    why: str = ""
    """Of a failed or skipped row: the reason, one paragraph."""
    more: dict[str, Any] = field(default_factory=dict)
    """JSON values that belong to the row: shapes, baselines, predictions, percentiles."""
    case: str = ""
    """The case that filed it, which `make gpu ROWS=` measures again."""


class Part:
    """Files rows, of any thread, and knows how much time is left.

    Args:
        name: of the part.
        device: what is measured.
        is_tiny: True if shapes only prove that the code runs (CI on a CPU).
        budget_s: seconds that the part may take.
        path: its JSON file.
        cases: name -> seconds after the start at which the case must have ended.
    """

    def __init__(
        self,
        name: str,
        device: "torch.device",
        is_tiny: bool,
        budget_s: float,
        path: Path,
        cases: Mapping[str, float] | None = None,
    ) -> None:
        self.name, self.device, self.is_tiny, self.path = name, device, is_tiny, path
        self.cases = dict(cases or {})
        self.rows: list[Row] = []
        self._expected: dict[str, list[str]] = {}
        self._running, self._ended = "", dict[str, str]()
        self._until_s = budget_s
        self._is_null = is_null_gpu()
        self._began, self._lock = clock.monotonic(), RLock()
        self._file(is_done=False)

    def left_s(self) -> float:
        """Return the seconds left of the running case, or of the part; below zero when they are spent."""
        return self._until_s - (clock.monotonic() - self._began)

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """File rows as those of a case, within its time."""
        self._until_s = self.cases[name]
        self._running = name
        self._file(is_done=False)
        yield
        self._ended.setdefault(name, DONE)
        self._running = ""
        self._file(is_done=False)

    def cut(self, why: str) -> None:
        """Say why the running case ends before its rows do."""
        self._ended[self._running] = why

    def expect(self, names: list[str]) -> None:
        """Say which rows are to come, so that those that time does not reach are named."""
        with self._lock:
            self._expected[self._running] = names
            self._file(is_done=False)

    def rows_of(self, name: str) -> list[Row]:
        """Return the rows of a part that ran before this one, in this run or in the one it is added to."""
        path = self.path.with_name(f"{name}.json")
        found = json.loads(path.read_text())["rows"] if path.exists() else []
        return [Row(**row) for row in found]

    def measured(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        **more: Any,
    ) -> None:
        """File a figure, also one of numpy, with the target it is held against if there is one."""
        target = at_least if at_most is None else at_most
        is_met = None
        if target is not None and not self.is_tiny and not self._is_null:
            is_met = bool(value >= target if at_most is None else value <= target)
        self._add(
            Row(
                name=name,
                status=NOT_COMPUTED if self._is_null else "measured",
                value=float(value),
                unit=unit,
                target=target,
                is_met=is_met,
                more=more,
                case=self._running,
            )
        )

    def held(self, name: str, **more: Any) -> None:
        """File an equality that held."""
        status: Status = NOT_COMPUTED if self._is_null else "held"
        self._add(Row(name=name, status=status, more=more, case=self._running))

    def failed(self, name: str, why: str, **more: Any) -> None:
        """File an equality that did not hold, or a figure that could not be measured because of an error."""
        self._add(Row(name=name, status="failed", why=why, more=more, case=self._running))

    def not_computed(self, name: str) -> None:
        """File that all of a row's code ran, on a device that computes nothing."""
        self._add(Row(name=name, status=NOT_COMPUTED, case=self._running))

    def skipped(self, name: str, why: str) -> None:
        """File what this machine, its memory or the time left does not allow."""
        self._add(Row(name=name, status="skipped", why=why, case=self._running))

    def done(self) -> None:
        """Say that nothing else was to come."""
        self._file(is_done=True)

    def _add(self, row: Row) -> None:
        """File a row in the place of one of its name, so that a figure may be filed early and then better."""
        value = "" if row.value is None else f" {row.value:.4g} {row.unit}"
        with self._lock:
            names = [one.name for one in self.rows]
            if row.name in names:
                self.rows[names.index(row.name)] = row
            else:
                self.rows.append(row)
            print(
                f"{self.name}: {row.name}: {row.status}{value}{' ' + row.why if row.why else ''}", flush=True
            )
            self._file(is_done=False)

    def _file(self, *, is_done: bool) -> None:
        cases = [*self._ended, *([self._running] if self._running else [])]
        found = {
            "part": self.name,
            "is_done": is_done,
            "cases": {
                case: {"ended": self._ended.get(case, RUNS), "expected": self._expected.get(case, [])}
                for case in cases
            },
            "expected": [name for names in self._expected.values() for name in names],
            "rows": [asdict(row) for row in self.rows],
        }
        write_atomic(self.path, as_json(found))


def as_json(found: object) -> str:
    """Return JSON of values that may be numbers or arrays of numpy or torch.

    >>> import numpy as np
    >>> as_json([np.bool_(True), np.float32(2), np.arange(2), Path("x")]).split()
    ['[', 'true,', '2.0,', '[', '0,', '1', '],', '"x"', ']']
    """
    return json.dumps(found, indent=1, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def open_part(name: str, description: str) -> Part:
    """Read the options that every part has; return the part."""
    import torch

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--budget-s", type=float, default=600.0)
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME:SECONDS",
        help="a case, and how long after the start it must have ended (default: all of the part)",
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    asked = [text.rpartition(":") for text in options.case]
    cases = {case: float(seconds) for case, _, seconds in asked}
    if not cases:
        cases = {case.name: options.budget_s for case in CASES if case.part == name}
    # where a part hangs that is killed a few seconds after its budget
    faulthandler.dump_traceback_later(options.budget_s + _HANGS_AFTER_S)
    device = torch.device(options.device)
    return Part(name, device, options.size == "tiny", options.budget_s, options.out, cases)

"""One row of the table of runs, from the first and the last bytes of its file: the middle is not read.

1,000 runs of any length are 1,000 times two small reads, and only of files that changed since the last time.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, Literal, TypedDict

from penstock.core import clock
from penstock.core.files import is_locked
from penstock.obs.metric_names import (
    CHECKPOINTS_FOLDER,
    HANGS_FOLDER,
    METRICS_FILE,
    RECIPE_FILE,
    checkpoint_name,
)
from penstock.obs.run_data.discover import FoundRun, shown
from penstock.obs.run_data.run_files import FileStamp, RunFiles
from penstock.obs.sinks import Record
from penstock.obs.sinks.jsonl import record_of

RunState = Literal["training", "stopped", "finished", "failed", "stalled"]

_HEAD_BYTES = 16 << 10
_TAIL_BYTES = (16 << 10, 1 << 20, 16 << 20)
"""Tried in turn, until there is a step among them: sample answers are long lines."""
_MAX_RECIPE_BYTES = 4 << 20
_FRESH_S = 30.0
_FRESH_STEPS = 5.0
_FRESH_UPLOAD_S = 600.0
"""Age of the newest upload up to which a run in an object store counts as training."""
_STEP_S = re.compile(rb'"step_s": ?([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{1,2})?)[,}]')
_PACE_STEPS = 20
"""Last steps whose median time tells how long the rest will take."""


class RunRow(TypedDict):
    """One run in the table; None: unknown."""

    id: str
    name: str
    path: str
    state: RunState
    step: int | None
    steps: int | None
    loss: float | None
    tokens: float | None
    tokens_per_s: float | None
    mfu: float | None
    data_wait: float | None
    exposed: float | None
    eta_s: float | None
    device_hours: float | None
    cost: float | None
    """Device-hours times their price."""
    started: str | None
    updated: float | None
    """Unix time."""
    ranks: int | None
    error: str | None


@dataclass(slots=True)
class _Known:
    """Records and recipe of a run as last read, valid while its files do not change."""

    stamp: FileStamp | None = None
    head: list[Record] = field(default_factory=list)
    """Starts among the first records."""
    tail: list[Record] = field(default_factory=list)
    """The last step, and starts and an early stop among the last records."""
    pace_s: float | None = None
    """Median time of the last steps in seconds."""
    recipe_stamp: FileStamp | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    hangs_stamp: FileStamp | None = None
    """Of the folder of hangs, to which files are renamed: each changes it."""
    hung_s: float = -math.inf
    """Unix time of the newest file of a hang."""
    lock_stamp: tuple[FileStamp | None, float] = (None, 0.0)
    is_held: bool = False


class Summaries:
    """Rows of runs; files that did not change are not read again.

    Args:
        price: of a device for an hour, for runs whose recipe names none; 0: unknown.
    """

    def __init__(self, *, price: float = 0.0) -> None:
        self._price = price
        self._known: dict[str, _Known] = {}

    def row(self, run: FoundRun) -> RunRow:
        """Return the row of a run; of a run that is gone, with what was known."""
        known = self._known.setdefault(run.id, _Known())
        updated = _read(run.files, known)
        self._read_recipe(run.files, known)
        row = row_of(run, known.head, known.tail, known.recipe, pace_s=known.pace_s, updated=updated)
        if (hours := row["device_hours"]) is not None and (price := self.price(run)):
            row["cost"] = hours * price
        row["state"], row["error"] = self._state(run.files, known, row)
        if row["state"] != "training":
            row["eta_s"] = None
        return row

    def recipe(self, run: FoundRun) -> Mapping[str, Any]:  # Any: JSON
        """Return the resolved recipe of the newest start; {} if there is none that can be read."""
        known = self._known.setdefault(run.id, _Known())
        self._read_recipe(run.files, known)
        return known.recipe

    def known_recipe(self, run: FoundRun) -> Mapping[str, Any]:  # Any: JSON
        """Return the recipe as it was read with the row; {} if it was not."""
        known = self._known.get(run.id)
        return known.recipe if known else {}

    def price(self, run: FoundRun) -> float:
        """Return the price of a device for an hour; 0: unknown."""
        section = self.recipe(run).get("run")
        own = _number(section.get("device_hour_price")) if isinstance(section, Mapping) else None
        return own or self._price

    def forget(self, ids: Sequence[str]) -> None:
        """Forget all runs but these."""
        for gone in self._known.keys() - set(ids):
            self._known.pop(gone, None)

    def _read_recipe(self, files: RunFiles, known: _Known) -> None:
        try:
            stamp = files.seen(RECIPE_FILE)
            if stamp == known.recipe_stamp:
                return
            recipe = {}
            if stamp.size <= _MAX_RECIPE_BYTES:
                with files.open(RECIPE_FILE) as file:
                    recipe = json.loads(file.read(stamp.size))
            known.recipe_stamp = stamp
            known.recipe = recipe if isinstance(recipe, dict) else {}
        except (OSError, ValueError, RecursionError):  # read again, also where the file did not change
            known.recipe_stamp, known.recipe = None, {}

    def _state(self, files: RunFiles, known: _Known, row: RunRow) -> tuple[RunState, str | None]:
        steps, step, age = row["steps"], row["step"] or 0, math.inf
        if row["updated"] is not None:
            age = abs(clock.unix_seconds() - row["updated"])  # a clock that jumped back is no progress
        if steps is not None and step >= steps:
            return "finished", None
        if any(record.get("event") == "early_stop" and record["step"] >= step for record in known.tail):
            return "finished", None
        if files.is_stored:  # who holds the run is not to be seen there
            return ("training" if age <= _FRESH_UPLOAD_S else "stopped"), None
        folder = files.folder
        if age <= max(_FRESH_S, _FRESH_STEPS * (known.pace_s or 0.0)) and self._is_held(folder, known):
            return "training", None
        if self._is_held(folder, known):
            hang = _hang(files, known)
            if row["updated"] is None and hang is None:  # it starts
                return "training", None
            return "stalled", hang or f"no record for {age:,.0f} s, and a job holds the run"
        if not step:
            return "stopped", None
        if _is_saved(folder, known.recipe, step):
            return "stopped", None
        return "failed", _hang(files, known) or f"it ended after step {step:,} without a checkpoint of it"

    def _is_held(self, folder: Path, known: _Known) -> bool:
        """Return whether a job holds the run's lock.

        To ask shares the lock for a moment, in which a job that starts waits: so it is asked once per change
        of the files, and again only while a job holds it.
        """
        try:
            stamp = known.stamp, (folder / ".lock").stat().st_mtime
        except OSError:
            return False
        if known.is_held or stamp != known.lock_stamp:
            try:
                known.lock_stamp, known.is_held = stamp, is_locked(folder)
            except OSError:  # another user's
                return False
        return known.is_held


def unread_row(run: FoundRun) -> RunRow:
    """Return the row of a run in an object store of which nothing was read yet."""
    row = row_of(run, (), (), {}, pace_s=None, updated=None)
    row["error"] = "Its object store has not answered yet."
    return row


def row_of(
    run: FoundRun,
    head: Sequence[Record],
    tail: Sequence[Record],
    recipe: Mapping[str, Any],  # Any: JSON
    *,
    pace_s: float | None,
    updated: float | None,
) -> RunRow:
    """Return the row of a run from some of its records, as "stopped": what only its folder tells comes
    later."""
    steps = [record for record in tail if "loss" in record and "event" not in record]
    last: Record = steps[-1] if steps else {}
    starts = [record for record in (*head, *tail) if record.get("event") == "start"]
    section = recipe.get("run")
    wanted = _whole(section.get("steps")) if isinstance(section, Mapping) else None
    step = _whole(last.get("step"))
    left = None if wanted is None or step is None or pace_s is None else max(0, wanted - step) * pace_s
    return RunRow(
        id=run.id,
        name=run.name,
        path=shown(run.files.location),
        state="stopped",
        step=step,
        steps=wanted,
        loss=_number(last.get("loss")),
        tokens=_number(last.get("tokens")),
        tokens_per_s=_number(last.get("tokens_per_s")),
        mfu=_number(last.get("mfu")),
        data_wait=_number(last.get("data_wait_share")),
        exposed=_number(last.get("communication_share")),
        eta_s=left,
        device_hours=_number(last.get("device_hours")),
        cost=None,
        started=str(starts[0]["time"]) if starts and "time" in starts[0] else None,
        updated=updated,
        ranks=_whole(starts[-1].get("ranks")) if starts else None,
        error=None,
    )


def _read(files: RunFiles, known: _Known) -> float | None:
    """Read a run's first and last records, if its file changed; return when it was written."""
    try:
        stamp = files.seen(METRICS_FILE)
        if stamp != known.stamp:
            with files.open(METRICS_FILE) as file:
                known.head, _ = _records(_bytes(file, 0, _HEAD_BYTES), is_start=True)
                for most in _TAIL_BYTES:
                    first = max(0, stamp.size - most)
                    known.tail, known.pace_s = _records(_bytes(file, first, most), is_start=not first)
                    if not first or any("loss" in record for record in known.tail):
                        break
            known.stamp = stamp
    except OSError:
        pass
    return known.stamp.modified_s if known.stamp else None


def _bytes(file: BinaryIO, first: int, number: int) -> bytes:
    file.seek(first)
    return file.read(number)


def _records(content: bytes, *, is_start: bool) -> tuple[list[Record], float | None]:
    """Return what a row needs of some lines: starts, an early stop, the last step; and the median step time.

    Without a first line that is cut, and a last one that is not complete. Other lines are not decoded: of
    1,000 runs that would take seconds.
    """
    lines = content.split(b"\n")[:-1]
    found: list[Record] = []
    last: Record | None = None
    for line in reversed(lines if is_start else lines[1:]):
        if b'"start"' in line or b'"early_stop"' in line:
            if (record := record_of(line)) is not None:
                found.insert(0, record)
        elif last is None and b'"loss"' in line:
            record = record_of(line)
            last = record if record is not None and "loss" in record and "event" not in record else None
    times = [float(time) for time in _STEP_S.findall(content)[-_PACE_STEPS:]]
    return [*found, *([] if last is None else [last])], median(times) if times else None


def _is_saved(folder: Path, recipe: Mapping[str, Any], step: int) -> bool:
    """Return whether a step has a checkpoint; of those in an object store that is not asked."""
    section = recipe.get("checkpoint")
    location = str(section.get("dir", "") if isinstance(section, Mapping) else "")
    if "://" in location:
        return True
    try:
        return (
            (Path(location) if location else folder / CHECKPOINTS_FOLDER) / checkpoint_name(step)
        ).is_dir()
    except OSError:  # another user's folder, or a name that is none
        return False


def _hang(files: RunFiles, known: _Known) -> str | None:
    """Return that a run hung after its newest record; one before it ended with the job that trained on."""
    try:
        stamp = files.stamp(HANGS_FOLDER)
    except OSError:
        return None
    if stamp != known.hangs_stamp:
        stamps = files.stamps(HANGS_FOLDER).values()
        known.hung_s = max((each.modified_s for each in stamps), default=-math.inf)
        known.hangs_stamp = stamp
    recorded_s = known.stamp.modified_s if known.stamp else 0.0
    return "it hung: see hangs/" if known.hung_s >= recorded_s else None


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


def _whole(value: object) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and isinstance(value, int) and abs(value) < 2**53 else None

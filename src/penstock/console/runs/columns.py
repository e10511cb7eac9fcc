"""Columns of a run: one number per record and metric, in files of the user's cache folder.

    CACHE/console/<id>/state.json     how much of metrics.jsonl is in them, events, starts
    CACHE/console/<id>/0007.f64       one column, little-endian doubles, in the order of its records

A metric of 100,000 steps is 0.8 MB, read in a millisecond; their records are 60 MB, read in seconds. So a
run is parsed once, then extended by what is new. Columns are memory-mapped, and parsing holds one chunk of
the file: memory does not grow with a run. Whoever asks for a column meanwhile waits for a piece, not for all.

The cache may be deleted at any time. It holds one history: where steps go back, as after a resume from an
earlier checkpoint, what was recorded beyond is dropped and `generation` counts up, so that a reader who
holds a part of the curve knows that it is no longer true. A line that is no record is counted and left
out: to look at a run must be possible when it is damaged too.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.console.runs.events import RunEvent, event_of
from penstock.console.runs.parsed_file import ParsedFile
from penstock.console.runs.run_files import RunFiles
from penstock.console.runs.tail import FilePosition, Piece
from penstock.console.runs.turns import RunBusy
from penstock.obs.metric_names import BY_CORPUS, BY_TASK, METRICS_FILE
from penstock.obs.report.history import SLOW_RATIO
from penstock.obs.sinks import Record
from penstock.obs.thin import Float64

TABLES = ("steps", "validations", "tasks")
"""Records of steps, of validations and of tasks: each has its own steps."""
ELAPSED = "elapsed_s"
"""Column of all steps' time, waits for checkpoints included, in seconds since the run's start. Clocks that
jump do not change it."""

_VERSION = 4
_MOST_EVENTS = 10_000
"""Newest events."""
_MOST_SAMPLES = 256
_MOST_SLOW = 1000
"""Newest comparisons with a slow rank."""
_MOST_COLUMNS = 4096
"""Columns of a table; each is a file, and a damaged record may name any number of metrics."""
_TABLE_METRICS = frozenset((*BY_CORPUS, *BY_TASK))
_NUMBERS = {float, int}

try:
    from pydantic_core import from_json

    _decoded: Callable[[bytes], Any] = partial(from_json, cache_strings="keys")  # a quarter of json's time
except ImportError:  # `penstock report` without the packages of the server
    _decoded = json.loads


class SlowRank(NamedTuple):
    """Comparison of the ranks' own times in which one was slow."""

    step: int
    rank: int
    own_s: float
    """Seconds of a step."""
    median_s: float
    """Those of the median rank."""


@dataclass(slots=True)
class _Table:
    """Columns with one row per record of a kind."""

    num_rows: int = 0
    columns: dict[str, int] = field(default_factory=dict)
    """Metric -> number of its file."""


@dataclass(slots=True)
class _State:
    """Stored state of a run, besides its columns; JSON."""

    version: int = _VERSION
    mark: FilePosition = field(default_factory=FilePosition)
    generation: int = 0
    tables: dict[str, _Table] = field(default_factory=lambda: {name: _Table() for name in TABLES})
    num_files: int = 0
    events: list[RunEvent] = field(default_factory=list)
    num_events: int = 0
    """Those included that are no longer kept."""
    starts: list[Record] = field(default_factory=list)
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    """Step, offset and length of the records of sample answers."""
    slow_ranks: list[SlowRank] = field(default_factory=list)
    elapsed_s: float = 0.0
    last_step: float = -math.inf
    num_damaged: int = 0
    """Lines that are no records."""


class Cursor(NamedTuple):
    """How much of a run a reader has. A stream goes on from there.

    >>> Cursor.parsed("0.24.3.0.2.1") == Cursor(0, steps=24, validations=3, tasks=0, events=2, samples=1)
    True
    >>> Cursor.parsed("24")
    Cursor(generation=-1, steps=0, validations=0, tasks=0, events=0, samples=0)
    """

    generation: int
    steps: int = 0
    """Number of records of steps; so the next two."""
    validations: int = 0
    tasks: int = 0
    events: int = 0
    samples: int = 0
    """Records of sample answers that are kept, of very many every other one."""

    @classmethod
    def parsed(cls, text: str) -> "Cursor":
        """Return a cursor from its text; of another text one that no run goes on from."""
        if not re.fullmatch(r"\d{1,15}(\.\d{1,15}){5}", text, re.ASCII):
            return cls(generation=-1)
        return cls(*map(int, text.split(".")))

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @property
    def rows(self) -> dict[str, int]:
        """Number of records by table."""
        return dict(zip(TABLES, self[1:4], strict=True))


class RunColumns(ParsedFile[_State]):
    """Columns of one run, kept up with its file. Methods may be called from several threads.

    Args:
        files: files of the run.
        cache: folder of its columns.
    """

    def __init__(self, files: RunFiles, cache: Path) -> None:
        super().__init__(files, METRICS_FILE, cache)
        self._pending: dict[str, list[Record]] = {name: [] for name in TABLES}

    @property
    def generation(self) -> int:
        """Counts how often records were dropped: what was read before is then void."""
        return self._state.generation

    @property
    def cursor(self) -> Cursor:
        """Cursor of a reader who has all that is parsed.

        Raises:
            RunBusy: other requests read the run for too long.
        """
        with self._turns.turn():
            state, (steps, validations, tasks) = self._state, map(self.num_rows, TABLES)
            return Cursor(state.generation, steps, validations, tasks, state.num_events, len(state.samples))

    @property
    def num_damaged(self) -> int:
        """Number of lines that are no records."""
        return self._state.num_damaged

    @property
    def events(self) -> list[RunEvent]:
        """Newest events in order, without spikes."""
        return [*self._state.events]

    @property
    def starts(self) -> list[Record]:
        """Records of the run's starts."""
        return [*self._state.starts]

    @property
    def slow_ranks(self) -> list[SlowRank]:
        """Comparisons in which a rank was slow, in order."""
        return [*self._state.slow_ranks]

    def num_rows(self, table: str = "steps") -> int:
        """Return the number of records in a table."""
        return self._state.tables[table].num_rows

    def metrics(self) -> list[str]:
        """Return the names of all metrics; `corpus_tokens/web` is a metric of one corpus."""
        names = (name for table in self._state.tables.values() for name in table.columns)
        return [*dict.fromkeys(name for name in names if name != ELAPSED)]

    def table_of(self, metric: str) -> str:
        """Return the table with a metric; "steps" if there is none."""
        return next((name for name, t in self._state.tables.items() if metric in t.columns), "steps")

    def column(self, metric: str, *, table: str = "steps", first: int = 0) -> Float64:
        """Return a column from a row on; NaN where a record has no such value.

        Raises:
            RunBusy: other requests read the run for too long.
        """
        with self._turns.turn():
            self._check_open()
            try:
                return self._column(metric, table=table, first=first)
            except (OSError, ValueError):  # somebody deleted the cache, which is allowed
                self._restart()
                raise RunBusy("The columns of this run were deleted", fix="Ask again.") from None

    def _column(self, metric: str, *, table: str = "steps", first: int = 0) -> Float64:
        held = self._state.tables[table]
        past = held.num_rows
        if first >= past:
            return np.empty(0)
        if metric not in held.columns:
            return np.full(past - first, np.nan)
        path = self._path(held.columns[metric])
        return np.memmap(path, dtype="<f8", mode="r", offset=8 * first, shape=(past - first,))

    def answers(self) -> list[Record]:
        """Return the records of sample answers, read from the run's file."""
        with self._turns.turn():
            samples = [*self._state.samples]
        found = []
        with suppress(OSError), self._files.open(METRICS_FILE) as file:
            for _, offset, length in samples:
                file.seek(offset)
                record = _parsed(file.read(length))
                if record is not None and record.get("event") == "samples":
                    found.append(record)
        return found

    def _parse(self, piece: Piece) -> None:
        offset = piece.offset
        try:
            for line in piece.lines:
                self._add_line(line, offset)
                offset += len(line) + 1
            self._flush()
        except OSError:  # parse again, once there is room: columns of unequal lengths would be wrong
            self._restart()
            raise
        self._state.num_damaged += piece.num_dropped
        self._state.mark = piece.mark

    def _restart(self) -> None:
        generation = self._state.generation + 1
        self._pending = {name: [] for name in TABLES}
        super()._restart()
        self._state.generation = generation

    def _add_line(self, line: bytes, offset: int) -> None:
        record = _parsed(line)
        if record is None:
            self._state.num_damaged += bool(line.strip())
            return
        event, step = record.get("event"), record["step"]
        if event == "evaluation":
            self._pending["tasks"].append(record)
        elif event is not None:
            self._add_event(record, step, offset, len(line))
        elif "validation_loss" in record:
            self._pending["validations"].append(record)
        elif "loss" in record:
            if step <= self._state.last_step:
                self._go_back(step - 1)
            self._state.elapsed_s += _seconds(record.get("step_s")) + _seconds(record.get("checkpoint_s"))
            record = {ELAPSED: self._state.elapsed_s, **record}  # first: it is never left out
            self._state.last_step = step
            self._pending["steps"].append(record)

    def _add_event(self, record: Record, step: int, offset: int, length: int) -> None:
        state, kind = self._state, record["event"]
        if kind == "samples":
            state.samples = [*(each for each in state.samples if each[0] != step), (step, offset, length)]
            if len(state.samples) > _MOST_SAMPLES:
                state.samples = state.samples[::2]
            return
        if kind == "ranks":
            self._add_slow_rank(record, step)
            return
        before = state.starts[-1].get("ranks") if state.starts else None
        try:
            found = event_of(record, ranks_before=before)
        except (TypeError, ValueError, OverflowError):  # its values are not what a run writes
            state.num_damaged += 1
            return
        if kind == "start":
            if step < state.last_step:
                self._go_back(step)
            state.starts.append(record)
        if found is not None:
            state.events.append(found)
            del state.events[:-_MOST_EVENTS]
            state.num_events += 1

    def _add_slow_rank(self, record: Record, step: int) -> None:
        rank = record.get("slowest_rank")
        own_s, median_s = _seconds(record.get("slowest_s")), _seconds(record.get("median_s"))
        if type(rank) is int and own_s >= SLOW_RATIO * median_s > 0:
            slow = SlowRank(step, rank, own_s, median_s)
            self._state.slow_ranks = [*self._state.slow_ranks, slow][-_MOST_SLOW:]

    def _flush(self) -> None:
        """Append what was parsed to the files."""
        for name, records in self._pending.items():
            if not records:
                continue
            table, new, found = self._state.tables[name], len(records), _columns_of(records)
            room = max(0, _MOST_COLUMNS - len(table.columns))
            for metric in islice((metric for metric in found if metric not in table.columns), room):
                table.columns[metric] = self._state.num_files
                self._state.num_files += 1
                self._path(table.columns[metric]).write_bytes(b"")  # a killed process may have left one
                _append_nan(self._path(table.columns[metric]), table.num_rows)
            for metric, number in table.columns.items():
                column = found.get(metric)
                if column is None:
                    _append_nan(self._path(number), new)
                    continue
                with self._path(number).open("ab") as file:
                    file.write(column.tobytes())
            table.num_rows += new
            self._pending[name] = []

    def _go_back(self, step: float) -> None:
        """Drop the records of later steps."""
        self._flush()
        state = self._state
        for name, table in state.tables.items():
            if not table.num_rows:
                continue
            kept = int(np.searchsorted(self._column("step", table=name), step, side="right"))
            for metric, number in table.columns.items():  # new files: somebody may still read the old ones
                table.columns[metric] = state.num_files
                state.num_files += 1
                _copy(self._path(number), self._path(table.columns[metric]), 8 * kept)
                self._path(number).unlink()
            table.num_rows = kept
        rows = state.tables["steps"].num_rows
        state.last_step = float(self._column("step")[-1]) if rows else -math.inf
        state.elapsed_s = float(self._column(ELAPSED)[-1]) if rows else 0.0
        state.events = [event for event in state.events if event["step"] <= max(step, 0)]
        state.starts = [start for start in state.starts if start["step"] <= max(step, 0)]
        state.samples = [each for each in state.samples if each[0] <= step]
        state.slow_ranks = [each for each in state.slow_ranks if each.step <= step]
        state.generation += 1

    def _path(self, number: int) -> Path:
        return self._cache.path / f"{number:04d}.f64"

    def _first_state(self) -> _State:
        return _State()

    def _stored_state(self, raw: dict[str, Any]) -> _State:  # Any: JSON
        raw["tables"] = {name: _Table(**table) for name, table in raw["tables"].items()}
        raw["mark"] = FilePosition(**raw["mark"])
        raw["samples"] = [tuple(each) for each in raw["samples"]]
        raw["slow_ranks"] = [SlowRank(*each) for each in raw["slow_ranks"]]
        state = _State(**raw)
        if state.version != _VERSION or state.tables.keys() != set(TABLES):
            raise ValueError("another version")
        for table in state.tables.values():
            for number in table.columns.values():
                if (size := self._path(number).stat().st_size) < 8 * table.num_rows:
                    raise ValueError(f"a column of {size} bytes")
                os.truncate(self._path(number), 8 * table.num_rows)  # written after the state was saved
        return state


def _columns_of(records: Sequence[Record]) -> dict[str, Float64]:
    """Return the numbers of some records, [records] each; NaN where a record has none.

    >>> _columns_of([{"loss": 2.5, "corpus_tokens": {"web": 8}}, {"loss": None}])
    {'loss': array([2.5, nan]), 'corpus_tokens/web': array([ 8., nan])}
    """
    found: dict[str, Float64] = {}
    for name, values in _by_name(records).items():
        if name in _TABLE_METRICS:
            tables = [value if isinstance(value, dict) else {} for value in values]
            for of, each in _by_name(tables).items():
                _put(found, f"{name}/{of}", each)
        _put(found, name, values)
    return found


def _by_name(records: Sequence[Record]) -> Mapping[str, Sequence[Any]]:  # Any: JSON
    """Return the values of some records, [records] each; None where a record has none."""
    first = records[0]
    if len(first) > 1 and all(record.keys() == first.keys() for record in records):  # as almost always
        return dict(zip(first, zip(*map(itemgetter(*first), records), strict=True), strict=True))
    names = dict.fromkeys(chain.from_iterable(records))
    return {name: [record.get(name) for record in records] for name in names}


def _put(found: dict[str, Float64], name: str, values: Sequence[Any]) -> None:  # Any: JSON
    """Put numbers among the columns, if there is one among the values."""
    kinds = set(map(type, values))
    if not kinds & _NUMBERS:
        return
    try:
        if kinds <= _NUMBERS:
            found[name] = np.array(values, dtype="<f8")
            return
    except OverflowError:  # an integer beyond any float
        pass
    found[name] = np.array([_float(value) for value in values], dtype="<f8")


def _float(value: Any) -> float:  # Any: JSON
    try:
        return float(value) if type(value) in _NUMBERS else math.nan
    except OverflowError:
        return math.nan


def _parsed(line: bytes) -> Record | None:
    try:
        record = _decoded(line)
    except (ValueError, RecursionError):
        try:
            record = json.loads(line)  # some lines only this takes: those with a lone surrogate
        except (ValueError, RecursionError):
            return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int and abs(record["step"]) < 2**53
    return record if is_record else None


def _seconds(value: Any) -> float:  # Any: JSON
    seconds = _float(value)
    return seconds if 0 <= seconds < math.inf else 0.0


def _append_nan(path: Path, number: int) -> None:
    with path.open("ab") as file:
        for first in range(0, number, 1 << 20):
            file.write(np.full(min(1 << 20, number - first), np.nan, dtype="<f8").tobytes())


def _copy(source: Path, target: Path, num_bytes: int) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        while num_bytes and (part := old.read(min(num_bytes, 1 << 20))):
            num_bytes -= new.write(part)

"""Records of a run as columns of numbers, events and starts, kept up with its file.

    metrics.jsonl -> Tail (new lines) -> RunColumns (parses them) -> RunData (a view that does not change)

100,000 steps are parsed in half a second and held in 20 MB, so nothing is stored: every process reads for
itself. A reader gets what was read last, without waiting.

A run has one history: where steps go back, as after a resume from an earlier checkpoint, what was recorded
beyond is dropped and `generation` counts up, so that a reader who holds a part of the curve knows that it is
no longer true. A line that is no record is counted and left out: a damaged run can be looked at, too.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from random import getrandbits
from typing import NamedTuple

import numpy as np

from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.run_data.events import RunEvent, event_of
from penstock.obs.run_data.numbers import columns_of_records, columns_of_steps, parsed, seconds
from penstock.obs.run_data.run_files import RunFiles
from penstock.obs.run_data.tail import LineBlock, Tail
from penstock.obs.sinks import Record
from penstock.obs.thin import Float64

TABLES = ("steps", "validations", "tasks")
"""Records of steps, of validations and of tasks: each has its own steps."""
ELAPSED = "elapsed_s"
"""Column of all steps' time, waits for checkpoints included, in seconds since the run's start. Clocks that
jump do not change it."""
SLOW_RATIO = 1.2
"""Ratio to the median rank's time from which a slow rank is reported: some rank is always the slowest."""

_MAX_EVENTS = 10_000
"""Newest events."""
_MAX_SAMPLES = 256
_MAX_SLOW = 1000
"""Newest comparisons with a slow rank."""
_MAX_COLUMNS = 4096
"""Columns of a table; a damaged record may name any number of metrics."""
_FEW_BYTES = 16 << 10
"""Lines that are parsed one by one sooner than together."""
_ODD = (b'"event"', b'"validation_loss"')
"""Keys of lines that are not of steps."""


class SlowRank(NamedTuple):
    """Comparison of the ranks' own times in which one was slow."""

    step: int
    rank: int
    own_s: float
    """Seconds of a step."""
    median_s: float
    """Seconds of the median rank."""


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


@dataclass(slots=True)
class _Table:
    """Columns with one row per record of a kind; their arrays have room for more."""

    num_rows: int = 0
    columns: dict[str, Float64] = field(default_factory=dict)

    def append(self, found: Mapping[str, Float64], number: int) -> None:
        room, past = max(0, _MAX_COLUMNS - len(self.columns)), self.num_rows + number
        for name in islice((name for name in found if name not in self.columns), room):
            self.columns[name] = np.empty(0)
        for name, column in self.columns.items():
            if past > len(column):  # readers keep the old one
                grown = np.full(max(past, 2 * len(column)), np.nan)
                grown[: min(len(column), self.num_rows)] = column[: self.num_rows]
                self.columns[name] = column = grown
            if name in found:
                column[self.num_rows : past] = found[name]
        self.num_rows = past

    def cut(self, step: float) -> None:
        """Drop the records of later steps, in new arrays: somebody may still read the old ones."""
        if self.num_rows:
            kept = int(np.searchsorted(self.columns["step"][: self.num_rows], step, side="right"))
            self.columns = {name: column[:kept].copy() for name, column in self.columns.items()}
            self.num_rows = kept

    def shown(self) -> dict[str, Float64]:
        return {name: column[: self.num_rows] for name, column in self.columns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Records of a run, as far as they were read; they do not change."""

    files: RunFiles
    generation: int = 0
    """Counts how often records were dropped: what was read before is then void."""
    tables: Mapping[str, Mapping[str, Float64]] = field(default_factory=lambda: {name: {} for name in TABLES})
    """Table -> metric -> [records] values."""
    events: Sequence[RunEvent] = ()
    """Newest events in order, without spikes."""
    num_events: int = 0
    """Number of all events, dropped ones included."""
    starts: Sequence[Record] = ()
    """Records of the run's starts."""
    samples: Sequence[tuple[int, int, int]] = ()
    """Step, offset and length of the records of sample answers."""
    slow_ranks: Sequence[SlowRank] = ()
    """Comparisons in which a rank was slow, in order."""
    newest: Mapping[str, Record] = field(default_factory=dict)
    """Newest event "traffic", the bytes that the first rank sends in a step, and "early_stop"."""
    num_damaged: int = 0
    """Lines that are no records."""

    @property
    def cursor(self) -> Cursor:
        """Cursor of a reader who has all of it."""
        steps, validations, tasks = map(self.num_rows, TABLES)
        return Cursor(self.generation, steps, validations, tasks, self.num_events, len(self.samples))

    def num_rows(self, table: str = "steps") -> int:
        """Return the number of records in a table."""
        return len(self.tables[table].get("step", ()))

    def metrics(self) -> list[str]:
        """Return the names of all metrics; `corpus_tokens/web` is a metric of one corpus."""
        names = (name for table in self.tables.values() for name in table)
        return [*dict.fromkeys(name for name in names if name != ELAPSED)]

    def table_of(self, metric: str) -> str:
        """Return the table with a metric; "steps" if there is none."""
        return next((name for name, columns in self.tables.items() if metric in columns), "steps")

    def column(self, metric: str, *, table: str = "steps", first: int = 0) -> Float64:
        """Return a column from a row on; NaN where a record has no such value."""
        found = self.tables[table].get(metric)
        return np.full(max(0, self.num_rows(table) - first), np.nan) if found is None else found[first:]

    def answers(self) -> list[Record]:
        """Return the records of sample answers, read from the run's file."""
        found = []
        with suppress(OSError), self.files.open(METRICS_FILE) as file:
            for _, offset, length in self.samples:
                file.seek(offset)
                record = parsed(file.read(length))
                if record is not None and record.get("event") == "samples":
                    found.append(record)
        return found


class RunColumns:
    """The records of a run, kept up with its file. Methods may be called from several threads."""

    def __init__(self, files: RunFiles) -> None:
        self._files, self._tail = files, Tail(files, METRICS_FILE)
        self._generation = getrandbits(40)  # a reader may hold a part from a process that ended
        self.data = RunData(files=files, generation=self._generation)
        """Records read so far."""
        self._forget()

    @property
    def num_bytes(self) -> int:
        """Memory of the columns."""
        return sum(column.nbytes for table in self._tables.values() for column in table.columns.values())

    def update(self, *, most_s: float = math.inf) -> bool:
        """Add what is new in the file (`Tail.hand_over`)."""
        return self._tail.hand_over(self._take, most_s=most_s)

    def _take(self, block: LineBlock) -> None:
        if block.is_restart:
            self._generation += 1
            self._forget()
        self._add(block)
        self._publish()

    def _forget(self) -> None:
        self._tables = {name: _Table() for name in TABLES}
        self._pending: dict[str, list[Record]] = {name: [] for name in TABLES}
        self._events: list[RunEvent] = []
        self._num_events = 0
        self._starts: list[Record] = []
        self._samples: list[tuple[int, int, int]] = []
        self._slow_ranks: list[SlowRank] = []
        self._newest: dict[str, Record] = {}
        self._elapsed_s = 0.0
        self._last_step = -math.inf
        self._num_damaged = 0

    def _publish(self) -> None:
        self.data = RunData(
            files=self._files,
            generation=self._generation,
            tables={name: table.shown() for name, table in self._tables.items()},
            events=[*self._events],
            num_events=self._num_events,
            starts=[*self._starts],
            samples=[*self._samples],
            slow_ranks=[*self._slow_ranks],
            newest={**self._newest},
            num_damaged=self._num_damaged,
        )

    def _add(self, block: LineBlock) -> None:
        self._num_damaged += block.num_dropped
        for segment in _segments(block.content):
            offset = block.offset + segment.first
            if len(segment.content) < _FEW_BYTES or not self._add_together(segment, block.offset):
                for line in segment.content.split(b"\n")[:-1]:
                    self._add_line(line, parsed(line), offset)
                    offset += len(line) + 1
                self._flush()

    def _add_together(self, segment: "_Segment", offset: int) -> bool:
        """Add the lines after a start at once; return False where they have to be read one by one.

        Their steps go on from those before, so that nothing is dropped between them.

        Args:
            offset: bytes of the file before the block.
        """
        odd, steps = segment.odd, segment.steps
        records = [(line, parsed(line), first) for line, first in odd]
        if any(record and _kind(record) == "steps" for _, record, _ in records):
            return False
        found = columns_of_steps(steps) if steps else {"step": np.empty(0)}
        if found is None:
            return False
        last = self._last_step
        if odd and (first_record := records[0][1]) and first_record.get("event") == "start":
            last = min(last, first_record["step"])
        number = len(found["step"])
        if number and not (found["step"][0] > last and (np.diff(found["step"]) > 0).all()):
            return False
        for line, record, first in records:
            self._add_line(line, record, offset + first)
        self._flush()
        if number:
            took = np.zeros(number)
            for name in ("step_s", "checkpoint_s"):
                took += _durations(found[name]) if name in found else 0.0
            elapsed = np.cumsum(np.append(self._elapsed_s, took))[1:]
            self._tables["steps"].append({ELAPSED: elapsed, **found}, number)
            self._elapsed_s, self._last_step = float(elapsed[-1]), float(found["step"][-1])
        return True

    def _add_line(self, line: bytes, record: Record | None, offset: int) -> None:
        if record is None:
            self._num_damaged += bool(line.strip())
            return
        step, kind = record["step"], _kind(record)
        if kind == "events":
            self._add_event(record, step, offset, len(line))
        elif kind == "steps":
            if step <= self._last_step:
                self._go_back(step - 1)
            self._elapsed_s += seconds(record.get("step_s")) + seconds(record.get("checkpoint_s"))
            self._last_step = step
            self._pending["steps"].append({ELAPSED: self._elapsed_s, **record})  # first: it is never left out
        elif kind is not None:
            self._pending[kind].append(record)

    def _add_event(self, record: Record, step: int, offset: int, length: int) -> None:
        match record["event"]:
            case "samples":
                self._samples = [*(each for each in self._samples if each[0] != step), (step, offset, length)]
                if len(self._samples) > _MAX_SAMPLES:
                    self._samples = self._samples[::2]
                return
            case "ranks":
                self._add_slow_rank(record, step)
                return
            case "traffic" | "early_stop" as kind:
                self._newest[kind] = record
        before = self._starts[-1].get("ranks") if self._starts else None
        try:
            found = event_of(record, ranks_before=before)
        except (TypeError, ValueError, OverflowError):  # its values are not what a run writes
            self._num_damaged += 1
            return
        if record["event"] == "start":
            if step < self._last_step:
                self._go_back(step)
            self._starts.append(record)
        if found is not None:
            self._events.append(found)
            del self._events[:-_MAX_EVENTS]
            self._num_events += 1

    def _add_slow_rank(self, record: Record, step: int) -> None:
        rank = record.get("slowest_rank")
        own_s, median_s = seconds(record.get("slowest_s")), seconds(record.get("median_s"))
        if type(rank) is int and own_s >= SLOW_RATIO * median_s > 0:
            self._slow_ranks = [*self._slow_ranks, SlowRank(step, rank, own_s, median_s)][-_MAX_SLOW:]

    def _flush(self) -> None:
        """Append the records that were read one by one to their tables."""
        for name, records in self._pending.items():
            if records:
                self._tables[name].append(columns_of_records(records), len(records))
                self._pending[name] = []

    def _go_back(self, step: float) -> None:
        """Drop the records of later steps."""
        self._flush()
        for table in self._tables.values():
            table.cut(step)
        left = self._tables["steps"]
        self._last_step = float(left.columns["step"][-1]) if left.num_rows else -math.inf
        self._elapsed_s = float(left.columns[ELAPSED][-1]) if left.num_rows else 0.0
        self._events = [event for event in self._events if event["step"] <= max(step, 0)]
        self._starts = [start for start in self._starts if start["step"] <= max(step, 0)]
        self._samples = [each for each in self._samples if each[0] <= step]
        self._slow_ranks = [each for each in self._slow_ranks if each.step <= step]
        self._newest = {kind: record for kind, record in self._newest.items() if record["step"] <= step}
        self._generation += 1


def _kind(record: Record) -> str | None:
    """Return the table of a record, or "events"; None: it is none of these."""
    event = record.get("event")
    if event is not None:
        return "tasks" if event == "evaluation" else "events"
    return "validations" if "validation_loss" in record else "steps" if "loss" in record else None


class _Segment(NamedTuple):
    """Lines from one start to the next."""

    first: int
    """Bytes of the block before them."""
    content: bytes
    odd: list[tuple[bytes, int]]
    """Lines that are not of steps, each with the bytes of the block before it."""

    @property
    def steps(self) -> bytes:
        """The other lines."""
        if not self.odd:
            return self.content
        ends = [0, *(begin - self.first + len(line) + 1 for line, begin in self.odd)]
        begins = [*(begin - self.first for _, begin in self.odd), len(self.content)]
        return b"".join(self.content[end:begin] for end, begin in zip(ends, begins, strict=True))


def _segments(content: bytes) -> Iterator[_Segment]:
    begins = set()
    for mark in _ODD:
        found = content.find(mark)
        while found >= 0:
            begins.add(content.rfind(b"\n", 0, found) + 1)
            found = content.find(mark, content.find(b"\n", found))
    first, odd = 0, list[tuple[bytes, int]]()
    for begin in sorted(begins):
        line = content[begin : content.index(b"\n", begin)]
        if begin > first and b'"start"' in line:
            yield _Segment(first, content[first:begin], odd)
            first, odd = begin, []
        odd.append((line, begin))
    if first < len(content):
        yield _Segment(first, content[first:], odd)


def _durations(values: Float64) -> Float64:
    return np.where((values >= 0) & (values < math.inf), values, 0.0)

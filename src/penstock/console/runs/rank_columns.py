"""One metric of all ranks over steps, from RUN/ranks.jsonl, in files of the user's cache folder.

    CACHE/console/<id>-ranks/<metric>/state.json    how much of ranks.jsonl is in them, where ranks ran
    CACHE/console/<id>-ranks/<metric>/rows.i64      step and number of ranks of each record
    CACHE/console/<id>-ranks/<metric>/values.f32    values of each record, one per rank, little-endian

Records of 1,024 ranks are long: 10,000 of them are 270 MB, and 41 MB for one metric. Of each line only the
step and the wanted metric are decoded, once; later looks read the new end of the file.
"""

import json
import math
import re
from binascii import Error as NotBase64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64

from penstock.console.runs.parsed_file import ParsedFile
from penstock.console.runs.run_files import RunFiles
from penstock.console.runs.tail import FilePosition, Piece
from penstock.console.runs.turns import RunBusy
from penstock.core.errors import UsageError, nearest
from penstock.obs.metric_names import RANK_METRICS, RANKS_FILE
from penstock.obs.report.ranks import RankPlaces, RankTable, ReportedRanks

_VERSION = 2
_MOST_RANKS = 65_536
"""Longer rows are damaged."""
_VALUE_BYTES = 4
_MOST_STARTS = 256
_MOST_PLACES = 65_536
"""Ranks of all starts together: where those of older starts ran is forgotten."""
_MOST_CELLS = 4 << 20
"""Values of one table: of very many ranks there are fewer columns than were asked for."""
_REPORT_CELLS = 384 << 10
"""Values in a report of the metric that is shown first: 384 columns of 1,024 ranks, 2 MB as text."""
_OTHERS_CELLS = 256 << 10
"""The same of all others together."""
_REPORT_COLUMNS = 1000
_FEWEST_COLUMNS = 16
"""A metric of which a report had fewer is left out."""
_STEP = re.compile(rb'\{"step": (\d{1,15}), "steps": ')

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class _State:
    """Stored state, besides the values; JSON."""

    version: int = _VERSION
    mark: FilePosition = field(default_factory=FilePosition)
    num_rows: int = 0
    num_values: int = 0
    places: list[RankPlaces] = field(default_factory=list)
    """Of the newest starts, in order."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a line has a metric's values, in bytes from its beginning.

    The lines of as many ranks are alike, so that most of a line need not be searched for them.
    """

    first: int
    last: int
    """After the values."""
    length: int
    """Of the line, with its end."""

    @property
    def has_values(self) -> bool:
        return self.first < self.last


_NO_LAYOUT = _Layout(0, 0, 0)


class RankColumns(ParsedFile[_State]):
    """Values of one metric of all ranks, kept up with the file. Methods may be called from several threads.

    Args:
        files: files of the run.
        metric: of RANK_METRICS.
        cache: folder of its values.
    """

    _piece_bytes = 2 << 20  # some 5 ms: one metric of five is decoded

    def __init__(self, files: RunFiles, metric: str, cache: Path) -> None:
        super().__init__(files, RANKS_FILE, cache)
        self._opening = f'"{metric}": "'.encode()

    def table(
        self, *, columns: int, first: float = 0, last: float = math.inf, cells: int = _MOST_CELLS
    ) -> RankTable:
        """Return the records of steps between `first` and `last`.

        Args:
            columns: at most; of neighbours the largest value is kept, so that no straggler is lost.
            cells: values at most; of one column there are as many as ranks.
        """
        with self._turns.turn():
            self._check_open()
            state = self._state
            if not state.num_rows:
                return RankTable()
            try:
                rows = np.fromfile(self._rows, "<i8", count=2 * state.num_rows).reshape(state.num_rows, 2)
                mapped = np.memmap(self._values, "<f4", "r", shape=(state.num_values,))  # stays if unlinked
            except (OSError, ValueError):  # somebody deleted the cache, which is allowed
                self._restart()
                raise RunBusy("The values of this run's ranks were deleted", fix="Ask again.") from None
        values = np.asarray(mapped)  # whose slices are made faster
        return _thinned(rows, values, state.places, first=first, last=last, columns=columns, cells=cells)

    def _parse(self, piece: Piece) -> None:
        content, places = piece.content, self._state.places
        rows: list[tuple[int, int]] = []
        found: list[bytes] = []
        begin, layout = 0, _NO_LAYOUT
        while begin < len(content):
            step = _STEP.match(content, begin)
            layout = self._layout(content, begin, layout)
            if step is None:
                line = content[begin : begin + layout.length]
                places = _extended(places, _places(line, first_row=self._state.num_rows + len(rows)))
            elif layout.has_values:
                row = _decoded(content[begin + layout.first : begin + layout.last])
                if row is not None and 0 < len(row) <= _VALUE_BYTES * _MOST_RANKS:
                    rows.append((int(step[1]), len(row) // _VALUE_BYTES))
                    found.append(row)
            begin += layout.length
        if found:
            _append(self._rows, np.array(rows, dtype="<i8").tobytes(), at=16 * self._state.num_rows)
            _append(self._values, b"".join(found), at=_VALUE_BYTES * self._state.num_values)
        self._state = _State(
            mark=piece.mark,
            num_rows=self._state.num_rows + len(rows),
            num_values=self._state.num_values + sum(num_ranks for _, num_ranks in rows),
            places=places,
        )

    def _layout(self, content: bytes, begin: int, before: _Layout) -> _Layout:
        """Return the layout of the line that begins there; quickly if it is the one of the line before."""
        end = content.index(b"\n", begin) + 1
        if before.has_values and before.length == end - begin:
            opening, last = begin + before.first - len(self._opening), begin + before.last
            if content.startswith(self._opening, opening) and content[last : last + 1] == b'"':
                return before
        place = content.find(self._opening, begin, end)
        if place < 0:
            return _Layout(0, 0, end - begin)
        first = place + len(self._opening)
        last = content.find(b'"', first, end)
        return _Layout(first - begin, max(last, first) - begin, end - begin)

    @property
    def _rows(self) -> Path:
        return self._cache.path / "rows.i64"

    @property
    def _values(self) -> Path:
        return self._cache.path / "values.f32"

    def _first_state(self) -> _State:
        return _State()

    def _stored_state(self, raw: dict[str, Any]) -> _State:  # Any: JSON
        places = [RankPlaces(**each) for each in raw["places"]]
        state = _State(**{**raw, "mark": FilePosition(**raw["mark"]), "places": places})
        rows = np.fromfile(self._rows, "<i8", count=2 * state.num_rows).reshape(-1, 2)
        is_whole = len(rows) == state.num_rows and int(rows[:, 1].sum()) == state.num_values
        if state.version != _VERSION or not is_whole or self._values.stat().st_size < 4 * state.num_values:
            raise ValueError("another version, or damaged")
        return state


def check_rank_metric(name: str) -> None:
    """Refuse a metric that ranks do not have.

    Raises:
        UsageError: with the nearest one.
    """
    if name not in RANK_METRICS:
        raise UsageError("Ranks have no such metric", got=name, fix=nearest(name, list(RANK_METRICS)))


def reported_ranks(
    columns_of: Callable[[str], RankColumns], first: str, *, has_others: bool = True
) -> ReportedRanks:
    """Return the metrics of a run's ranks for a report: some 4 MB as text, however long the run is.

    Args:
        columns_of: opens a metric; it may be closed by the next call.
        first: metric that is shown first, and has the most columns.
        has_others: False: it is the only one. Each reads the whole file, once.
    """
    tables: dict[str, RankTable] = {}
    left_out: list[str] = []
    others = [metric for metric in RANK_METRICS if metric != first]
    for metric in (first, *others):
        if metric != first and not has_others:
            left_out.append(metric)
            continue
        cells = _REPORT_CELLS if metric == first else _OTHERS_CELLS // len(others)
        table = columns_of(metric).table(columns=_REPORT_COLUMNS, cells=cells)
        if metric != first and len(table.steps) < min(table.num_records, _FEWEST_COLUMNS):
            left_out.append(metric)
        elif table.steps:
            tables[metric] = table
    return ReportedRanks(tables=tables, left_out=left_out)


def _thinned(
    rows: Int64,
    values: Float32,
    places: Sequence[RankPlaces],
    *,
    first: float,
    last: float,
    columns: int,
    cells: int,
) -> RankTable:
    """Return a table of records.

    Args:
        rows: [records, 2] step and number of values of each.
        values: of all records, one after the other.
        places: where the ranks ran, by start.
    """
    shown = np.flatnonzero((rows[:, 0] >= first) & (rows[:, 0] <= last))
    if not len(shown):
        return RankTable()
    steps, widths = rows[shown].T
    begins = (np.cumsum(rows[:, 1]) - rows[:, 1])[shown]
    widest = int(widths.max())
    starts = np.searchsorted(shown, [each.first_row for each in places])
    within = np.unique(starts[(starts > 0) & (starts < len(shown))])
    most = min(columns, max(1, cells // widest))
    edges = np.linspace(0, len(shown), min(len(shown), max(1, most - len(within))) + 1).astype(np.int64)
    edges = np.union1d(edges, within)
    found = np.full((len(edges) - 1, widest), np.nan, np.float32)
    sums, numbers = np.zeros(widest), np.zeros(widest, np.int64)
    is_other = (np.diff(shown) != 1) | (np.diff(widths) != 0)
    cuts = [0, *(np.flatnonzero(is_other) + 1).tolist(), len(shown)]
    for begin, end in pairwise(cuts):  # records that lie together, of as many ranks
        width = int(widths[begin])
        block = values[begins[begin] : begins[begin] + (end - begin) * width].reshape(-1, width)
        column = int(np.searchsorted(edges, begin, side="right")) - 1
        while edges[column] < end:  # column by column: a seventeenth of the time of np.fmax.reduceat
            part = block[max(edges[column] - begin, 0) : edges[column + 1] - begin]
            np.fmax(found[column, :width], np.fmax.reduce(part, axis=0), out=found[column, :width])
            total, number = part.sum(axis=0, dtype=np.float64), np.int64(len(part))
            if np.isnan(total).any():  # rare, and three passes more
                is_known = ~np.isnan(part)
                total, number = (
                    np.where(is_known, part, 0).sum(axis=0, dtype=np.float64),
                    is_known.sum(axis=0),
                )
            sums[:width] += total
            numbers[:width] += number
            column += 1
    column_of = dict(zip(np.searchsorted(edges, starts).tolist(), places, strict=True))  # the last start wins
    column_of.pop(len(edges) - 1, None)  # none of its records is shown
    means = np.divide(sums, numbers, out=np.full(widest, np.nan), where=numbers > 0)
    return RankTable(steps[edges[1:] - 1].tolist(), found.T, means, len(shown), column_of)


def _append(path: Path, content: bytes, *, at: int) -> None:
    """Write at the end of what is valid: a killed process or a full disk may have left more."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(at)
        file.write(content)


def _places(line: bytes, *, first_row: int) -> RankPlaces | None:
    try:
        record = json.loads(line)
        hosts, devices = record["hosts"], record["devices"]
        nics = record.get("nics") or [""] * len(hosts)  # an older version wrote none
        named = ([str(each) for each in names[:_MOST_RANKS]] for names in (hosts, devices, nics))
        found = RankPlaces(first_row, *named)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if len(found.hosts) == len(found.devices) == len(found.nics) else None


def _extended(places: list[RankPlaces], new: RankPlaces | None) -> list[RankPlaces]:
    """Return the places of the newest starts; a start whose ranks are where they were adds nothing."""
    if new is None or (places and replace(new, first_row=places[-1].first_row) == places[-1]):
        return places
    kept = [*(each for each in places if each.first_row < new.first_row), new][-_MOST_STARTS:]
    while sum(len(each.hosts) for each in kept) > _MOST_PLACES:
        kept.pop(0)
    return kept


def _decoded(packed: bytes) -> bytes | None:
    """Return the float32 values of base64 text as bytes; None: they are damaged."""
    try:
        found = pybase64.b64decode(packed, validate=True)
    except (NotBase64, ValueError):
        return None
    return found if len(found) % _VALUE_BYTES == 0 else None

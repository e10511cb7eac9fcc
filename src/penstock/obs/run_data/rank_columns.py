"""One metric of all ranks over steps, from RUN/ranks.jsonl, kept up with the file.

Records of 1,024 ranks are long: 10,000 of them are 270 MB, and 41 MB for one metric. Of each line only the
step and the wanted metric are decoded, once; later looks read the new end of the file.
"""

import json
import math
import re
from binascii import Error as NotBase64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pybase64

from penstock.core.errors import UsageError, nearest
from penstock.obs.metric_names import RANK_METRICS, RANKS_FILE
from penstock.obs.run_data.run_files import RunFiles
from penstock.obs.run_data.tail import LineBlock, Tail

_MAX_RANKS = 65_536
"""Longer rows are damaged."""
_VALUE_BYTES = 4
_BLOCK_BYTES = 4 << 20
"""Twice the longest line; in blocks of 8 MiB parsing takes 1.3 to 2 times as long."""
_MAX_STARTS = 256
_MAX_PLACES = 65_536
"""Ranks of all starts together: where those of older starts ran is forgotten."""
_MAX_CELLS = 4 << 20
"""Values of one table: of very many ranks there are fewer columns than were asked for."""
_STEP = re.compile(rb'\{"step": (\d{1,15}), "steps": ')

_T = TypeVar("_T", bound=np.generic)
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class RankPlaces:
    """Hosts, devices and network interfaces of the ranks from a start of the job on, by rank."""

    first_row: int
    """Records before that start."""
    hosts: list[str]
    devices: list[str]
    nics: list[str]
    """Names; "" where a rank told none."""


@dataclass(slots=True)
class RankTable:
    """Values of a metric by rank and step."""

    steps: list[int] = field(default_factory=list)
    """Last step of each column."""
    values: Float32 = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[ranks, columns]; the largest of the column's records, NaN where a rank did not exist."""
    means: Float64 = field(default_factory=lambda: np.empty(0))
    """[ranks]; means over all records, not over columns."""
    num_records: int = 0
    """Records in all columns together."""
    places: dict[int, RankPlaces] = field(default_factory=dict)
    """Column -> where the ranks ran from it on. No column has records of two starts with other places."""


@dataclass(frozen=True, slots=True)
class _Read:
    """Records read from the file. The arrays have spare room behind them."""

    num_rows: int = 0
    num_values: int = 0
    rows: Int64 = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """[num_rows, 2] step and number of values of each record."""
    values: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    """[num_values] of all records, one after the other."""
    places: tuple[RankPlaces, ...] = ()
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
    """Length of the line in bytes, its end included."""

    @property
    def has_values(self) -> bool:
        return self.first < self.last


_NO_LAYOUT = _Layout(0, 0, 0)


class RankColumns:
    """Values of one metric of all ranks, kept up with the file. Methods may be called from several threads.

    Args:
        files: files of the run.
        metric: of RANK_METRICS.
    """

    def __init__(self, files: RunFiles, metric: str) -> None:
        self._tail = Tail(files, RANKS_FILE, block_bytes=_BLOCK_BYTES)
        self._opening = f'"{metric}": "'.encode()
        self._read = _Read()

    @property
    def num_bytes(self) -> int:
        """Memory of the values."""
        return self._read.rows.nbytes + self._read.values.nbytes

    def update(self, *, most_s: float = math.inf) -> bool:
        """Add what is new in the file (`Tail.hand_over`)."""
        return self._tail.hand_over(self._take, most_s=most_s)

    def _take(self, block: LineBlock) -> None:
        self._read = self._parsed(_Read() if block.is_restart else self._read, block)

    def table(
        self, *, columns: int, first: float = 0, last: float = math.inf, cells: int = _MAX_CELLS
    ) -> RankTable:
        """Return the records of steps between `first` and `last`.

        Args:
            columns: at most; of neighbours the largest value is kept, so that no straggler is lost.
            cells: values at most; of one column there are as many as ranks.
        """
        read = self._read
        if not read.num_rows:
            return RankTable()
        rows, values = read.rows[: read.num_rows], read.values[: read.num_values]
        return _thinned(rows, values, read.places, first=first, last=last, columns=columns, cells=cells)

    def _parsed(self, read: _Read, block: LineBlock) -> _Read:
        content, places = block.content, read.places
        rows: list[tuple[int, int]] = []
        found: list[bytes] = []
        begin, layout = 0, _NO_LAYOUT
        while begin < len(content):
            step = _STEP.match(content, begin)
            layout = self._layout(content, begin, layout)
            if step is None:
                line = content[begin : begin + layout.length]
                places = _extended(places, _places(line, first_row=read.num_rows + len(rows)))
            elif layout.has_values:
                row = _decoded(content[begin + layout.first : begin + layout.last])
                if row is not None and 0 < len(row) <= _VALUE_BYTES * _MAX_RANKS:
                    rows.append((int(step[1]), len(row) // _VALUE_BYTES))
                    found.append(row)
            begin += layout.length
        values = np.frombuffer(b"".join(found), "<f4")
        return _Read(
            num_rows=read.num_rows + len(rows),
            num_values=read.num_values + len(values),
            rows=_grown(read.rows, read.num_rows, np.array(rows, np.int64).reshape(-1, 2)),
            values=_grown(read.values, read.num_values, values),
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


def check_rank_metric(name: str) -> None:
    """Refuse a metric that ranks do not have.

    Raises:
        UsageError: with the nearest one.
    """
    if name not in RANK_METRICS:
        raise UsageError("Ranks have no such metric", got=name, fix=nearest(name, list(RANK_METRICS)))


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


def _grown(held: npt.NDArray[_T], number: int, new: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Return an array with values after the first `number`; a new one if there is no room in it."""
    past = number + len(new)
    if past > len(held):  # readers keep the old one
        grown = np.empty((max(past, 2 * len(held)), *held.shape[1:]), held.dtype)
        grown[:number] = held[:number]
        held = grown
    held[number:past] = new
    return held


def _places(line: bytes, *, first_row: int) -> RankPlaces | None:
    try:
        record = json.loads(line)
        hosts, devices = record["hosts"], record["devices"]
        nics = record.get("nics") or [""] * len(hosts)  # an older version wrote none
        named = ([str(each) for each in names[:_MAX_RANKS]] for names in (hosts, devices, nics))
        found = RankPlaces(first_row, *named)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if len(found.hosts) == len(found.devices) == len(found.nics) else None


def _extended(places: tuple[RankPlaces, ...], new: RankPlaces | None) -> tuple[RankPlaces, ...]:
    """Return the places of the newest starts; a start whose ranks are where they were adds nothing."""
    if new is None or (places and replace(new, first_row=places[-1].first_row) == places[-1]):
        return places
    kept = [*(each for each in places if each.first_row < new.first_row), new][-_MAX_STARTS:]
    while sum(len(each.hosts) for each in kept) > _MAX_PLACES:
        kept.pop(0)
    return tuple(kept)


def _decoded(packed: bytes) -> bytes | None:
    """Return the float32 values of base64 text as bytes; None: they are damaged."""
    try:
        found = pybase64.b64decode(packed, validate=True)
    except (NotBase64, ValueError):
        return None
    return found if len(found) % _VALUE_BYTES == 0 else None

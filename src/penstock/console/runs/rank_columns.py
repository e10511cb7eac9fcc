"""One metric of all ranks over steps, from RUN/ranks.jsonl, in files of the user's cache folder.

    CACHE/console/<id>-ranks/<metric>/state.json    how much of ranks.jsonl is in them, who the ranks are
    CACHE/console/<id>-ranks/<metric>/rows.i64      step and number of ranks of each record
    CACHE/console/<id>-ranks/<metric>/values.f32    values of each record, one per rank, little-endian

Records of 1,024 ranks are long: 10,000 of them are 270 MB, and 41 MB for one metric. Of each line only the
step and the wanted metric are decoded, once; later looks read the new end of the file.
"""

import json
import math
import re
from base64 import b64decode
from binascii import Error as NotBase64
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.console.runs.cache_folder import CacheFolder
from penstock.console.runs.run_files import FileStamp, RunFiles
from penstock.console.runs.tail import FilePosition, Piece, read_on
from penstock.console.runs.turns import RunBusy, Turns
from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.obs.metric_names import RANKS_FILE

_VERSION = 1
_MOST_RANKS = 65_536
"""Longer rows are damaged."""
_MOST_CELLS = 4 << 20
"""Values of one table: of very many ranks there are fewer columns than were asked for."""
_SAVE_AFTER_S = 5.0
_STEP = re.compile(rb'\{"step": (\d{1,15}), "steps": ')

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class RankTable:
    """Values of a metric by rank and step."""

    steps: list[int] = field(default_factory=list)
    """Last step of each column."""
    values: Float32 = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[ranks, columns]; the largest of the column's records, NaN where a rank did not exist."""
    num_records: int = 0
    """Records in all columns together."""
    ranks: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    """Rank, host, device and network interfaces, of the newest start."""


@dataclass(slots=True)
class _State:
    """Stored state, besides the values; JSON."""

    version: int = _VERSION
    mark: FilePosition = field(default_factory=FilePosition)
    num_rows: int = 0
    num_values: int = 0
    ranks: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON


class RankColumns:
    """Values of one metric of all ranks, kept up with the file. Methods may be called from several threads.

    Args:
        files: files of the run.
        metric: of RANK_METRICS.
        cache: folder of its values.
    """

    def __init__(self, files: RunFiles, metric: str, cache: Path) -> None:
        self._files = files
        self._opening = f'"{metric}": "'.encode()
        self._stamp: FileStamp | None = None  # of an object that was read to its end
        self._turns = Turns()
        self._cache = CacheFolder(cache)
        self._is_closed = False
        self._state = self._load()
        self._saved_at = -math.inf

    def close(self) -> None:
        """Save, and let another process use the cache."""
        with self._turns.turn(is_patient=True):
            if self._is_closed:
                return
            self._is_closed = True
            self._save()
            self._cache.close()

    @property
    def position(self) -> FilePosition:
        """Position in the file after what is in the columns."""
        return self._state.mark

    def update(self, *, most_s: float = math.inf) -> bool:
        """Add what is new in the file; return whether that was all.

        Args:
            most_s: seconds after which the rest is left to a later call.

        Raises:
            PenstockError: the cache folder cannot be written.
            RunBusy: other requests read the run for too long.
        """
        begin = clock.monotonic()
        try:
            stamp = self._files.stamp(RANKS_FILE)  # an object is opened at the version last seen
            if self._files.is_stored and stamp == self._stamp:
                return True
            with self._files.open(RANKS_FILE) as file:
                is_all = read_on(file, self, self._turns, until=begin + most_s)
        except OSError:  # deleted, not written yet, or replaced while it was read
            return True
        if is_all:
            self._stamp = stamp
        if clock.monotonic() - self._saved_at > _SAVE_AFTER_S:
            with self._turns.turn():
                if not self._is_closed:
                    self._save()
        return is_all

    def table(self, *, first: float, last: float, columns: int) -> RankTable:
        """Return the records of steps between `first` and `last`.

        Args:
            columns: at most; of neighbours the largest value is kept, so that no straggler is lost.
        """
        with self._turns.turn():
            self._check_open()
            state = self._state
            if not state.num_rows:
                return RankTable(ranks=state.ranks)
            rows = np.fromfile(self._rows, "<i8", count=2 * state.num_rows).reshape(-1, 2)
            values = np.memmap(self._values, "<f4", "r", shape=(state.num_values,))  # stays if it is unlinked
            ranks = state.ranks
        found = _thinned(rows, values, first=first, last=last, columns=columns)
        found.ranks = ranks
        return found

    def add(self, piece: Piece) -> None:
        """Add lines; for `read_on`.

        Raises:
            PenstockError: the cache folder cannot be written.
        """
        self._check_open()
        rows, found, ranks = [], [], self._state.ranks
        for line in piece.lines:
            step = _STEP.match(line)
            if step is None:
                ranks = _ranks(line) or ranks
                continue
            begin = line.find(self._opening) + len(self._opening)
            row = _decoded(line[begin : line.find(b'"', begin)]) if begin >= len(self._opening) else None
            if row is not None and 0 < len(row) <= _MOST_RANKS:
                rows.append((int(step[1]), len(row)))
                found.append(row)
        try:
            if found:
                _append(self._rows, np.array(rows, dtype="<i8").tobytes(), at=16 * self._state.num_rows)
                content = np.concatenate(found).tobytes()
                _append(self._values, content, at=4 * self._state.num_values)
        except OSError as error:
            raise PenstockError(
                "The console cannot write what it has parsed of a run",
                got=str(error),
                fix="Make room on that disk, or set PENSTOCK_CACHE to a folder on another one.",
            ) from None
        self._state = _State(
            mark=piece.mark,
            num_rows=self._state.num_rows + len(rows),
            num_values=self._state.num_values + sum(map(len, found)),
            ranks=ranks,
        )

    def restart(self) -> None:
        """Forget everything: the file was rewritten; for `read_on`."""
        self._check_open()
        self._cache.empty()
        self._state = _State()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RunBusy("So many runs are open that this one was closed", fix="Ask for it again.")

    @property
    def _rows(self) -> Path:
        return self._cache.path / "rows.i64"

    @property
    def _values(self) -> Path:
        return self._cache.path / "values.f32"

    def _load(self) -> _State:
        """Return the state of the cache; an empty one if it is damaged or of another version."""
        try:
            raw = json.loads((self._cache.path / "state.json").read_bytes())
            state = _State(**{**raw, "mark": FilePosition(**raw["mark"])})
            rows = np.fromfile(self._rows, "<i8", count=2 * state.num_rows).reshape(-1, 2)
            is_whole = len(rows) == state.num_rows and int(rows[:, 1].sum()) == state.num_values
            if (
                state.version != _VERSION
                or not is_whole
                or self._values.stat().st_size < 4 * state.num_values
            ):
                raise ValueError("another version, or damaged")
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._cache.empty()
            return _State()
        return state

    def _save(self) -> None:
        draft = self._cache.path / ".state.tmp"
        with suppress(OSError):
            draft.write_text(json.dumps(asdict(self._state)), encoding="utf-8")
            draft.replace(self._cache.path / "state.json")
        self._saved_at = clock.monotonic()


def _thinned(rows: Int64, values: Float32, *, first: float, last: float, columns: int) -> RankTable:
    """Return a table of records.

    Args:
        rows: [records, 2] step and number of values of each.
        values: of all records, one after the other.
    """
    places = np.flatnonzero((rows[:, 0] >= first) & (rows[:, 0] <= last))
    if not len(places):
        return RankTable()
    steps, widths = rows[places].T
    begins = (np.cumsum(rows[:, 1]) - rows[:, 1])[places]
    widest = int(widths.max())
    num = min(len(places), columns, max(1, _MOST_CELLS // widest))
    edges = np.linspace(0, len(places), num + 1).astype(np.int64)
    found = np.full((num, widest), np.nan, np.float32)
    is_other = (np.diff(places) != 1) | (np.diff(widths) != 0)
    cuts = [0, *(np.flatnonzero(is_other) + 1).tolist(), len(places)]
    for begin, end in pairwise(cuts):  # records that lie together, of as many ranks
        width = int(widths[begin])
        block = values[begins[begin] : begins[begin] + (end - begin) * width].reshape(-1, width)
        shown = int(np.searchsorted(edges, begin, side="right")) - 1
        while edges[shown] < end:  # column by column: a seventeenth of the time of np.fmax.reduceat
            part = block[max(edges[shown] - begin, 0) : edges[shown + 1] - begin]
            np.fmax(found[shown, :width], np.fmax.reduce(part, axis=0), out=found[shown, :width])
            shown += 1
    return RankTable(steps[edges[1:] - 1].tolist(), found.T, len(places))


def _append(path: Path, content: bytes, *, at: int) -> None:
    """Write at the end of what is valid: a killed process or a full disk may have left more."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(at)
        file.write(content)


def _ranks(line: bytes) -> list[dict[str, Any]]:
    try:
        record = json.loads(line)
        hosts, devices = record["hosts"][:_MOST_RANKS], record["devices"][:_MOST_RANKS]
        nics = (record.get("nics") or [""] * len(hosts))[:_MOST_RANKS]  # an older version wrote none
        return [
            {"rank": rank, "host": str(host), "device": str(device), "nic": str(nic) or None}
            for rank, (host, device, nic) in enumerate(zip(hosts, devices, nics, strict=True))
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


def _decoded(packed: bytes) -> Float32 | None:
    try:
        return np.frombuffer(b64decode(packed, validate=True), dtype="<f4")
    except (NotBase64, ValueError):
        return None

"""State of the console: the runs it shows, and what it has read of them."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from penstock.console.access import ConsoleAccess
from penstock.console.workers.data_process import DataProcess
from penstock.console.workers.model_slot import ModelSlot, opener
from penstock.core.toml import flat, plain
from penstock.obs.run_data.columns import RunColumns, RunData
from penstock.obs.run_data.discover import FoundRun, RunFolders
from penstock.obs.run_data.hangs import RecentHangs
from penstock.obs.run_data.rank_columns import RankColumns
from penstock.obs.run_data.run_row import RunRow, Summaries
from penstock.obs.run_data.step_rows import KnownLosses
from penstock.obs.run_data.table_rows import TableRows

_MAX_OPEN = 64
"""Runs whose columns are held."""
_MAX_BYTES = 1 << 30
"""Memory of the columns of all runs, and of their ranks likewise, besides that of the newest one."""
_STORE_S = 2.0
"""Seconds for which the table waits for object stores; then it shows what they told last."""
_FIRST_S = 30.0
"""Seconds for which a view waits for a run to be parsed; of a longer one it shows the beginning."""


_Key = TypeVar("_Key")
_Columns = TypeVar("_Columns", RunColumns, RankColumns)


class ConsoleState:
    """Runs and what was read of them; methods may be called from several threads.

    Args:
        roots: folders of runs, or folders that hold them; addresses of such folders.
        price: of a device for an hour, for runs whose recipe names none; 0: unknown.
    """

    def __init__(
        self,
        roots: Sequence[Path | str],
        rules: ConsoleAccess,
        *,
        price: float = 0.0,
    ) -> None:
        self.rules = rules
        self.folders = RunFolders(roots)
        self.summaries = Summaries(price=price)
        self._table = TableRows(self.summaries)
        self.data = DataProcess()
        self.models = ModelSlot(opener(self.data))
        self.losses = KnownLosses()
        self.recent_hangs = RecentHangs()
        self.is_ending = False
        """True once streams should end."""
        self._columns: OrderedDict[str, RunColumns] = OrderedDict()
        self._rank_columns: OrderedDict[tuple[str, str], RankColumns] = OrderedDict()
        self._lock = Lock()

    def rows(self, search: str = "", *, most_s: float | None = _STORE_S) -> list[RunRow]:
        """Return the rows of all runs, or of those whose name or recipe has all words of a search.

        Args:
            most_s: seconds to wait for object stores; None: until each has answered or failed.
        """
        runs = self.folders.runs()
        self._table.forget(runs)
        rows = self._table.of(runs, most_s=most_s)
        words = search.lower().split()
        if not words:
            return rows
        texts = [f"{run.name} {_text(self.summaries.known_recipe(run))}" for run in runs]
        searched = zip(rows, texts, strict=True)
        return [row for row, text in searched if all(word in text.lower() for word in words)]

    def row(self, run: FoundRun, *, most_s: float = _STORE_S) -> RunRow:
        """Return the row of one run; the ranks of its newest start, where its columns are open."""
        (row,) = self._table.of([run], most_s=most_s)
        with self._lock:
            columns = self._columns.get(run.id)
        starts = columns.data.starts if columns else ()
        ranks = starts[-1].get("ranks") if starts else None
        return {**row, "ranks": ranks} if type(ranks) is int else row

    def columns(self, run: FoundRun, *, most_s: float = _FIRST_S) -> RunData:
        """Return what a run has recorded, with what is new in its file."""
        columns = self._opened(self._columns, run.id, lambda: RunColumns(run.files))
        columns.update(most_s=most_s)
        return columns.data

    def rank_columns(self, run: FoundRun, metric: str) -> RankColumns:
        """Return a metric of the run's ranks, with what is new in its file."""
        columns = self._opened(self._rank_columns, (run.id, metric), lambda: RankColumns(run.files, metric))
        columns.update(most_s=_FIRST_S)
        return columns

    def _opened(
        self, known: OrderedDict[_Key, _Columns], key: _Key, make: Callable[[], _Columns]
    ) -> _Columns:
        """Return open columns; of too many, those that were asked for the longest time ago are forgotten."""
        with self._lock:
            columns = known.pop(key, None) or make()
            held = sum(each.num_bytes for each in known.values())
            while known and (held > _MAX_BYTES or len(known) >= _MAX_OPEN):
                held -= known.popitem(last=False)[1].num_bytes
            known[key] = columns
            return columns

    def end(self) -> None:
        """Let streams end."""
        self.is_ending = True

    def close(self) -> None:
        """End the worker processes and the threads."""
        self.models.close()
        self.data.close()
        self._table.close()


async def console_of(request: Request) -> ConsoleState:
    """Return the application's state; async, because FastAPI runs a plain function in a thread."""
    state: ConsoleState = request.app.state.console
    return state


Console = Annotated[ConsoleState, Depends(console_of)]
"""Parameter of a route: the application's state."""


def run_of(run_id: str, console: Console) -> FoundRun:
    """Return a run by its id.

    Raises:
        UnknownRun: there is none.
    """
    return console.folders.run(run_id)


Run = Annotated[FoundRun, Depends(run_of)]
"""Parameter of a route: the run whose id is in its path."""


def finite(value: float) -> float | None:
    """Return a number as JSON has it: None for NaN and infinities."""
    return value if math.isfinite(value) else None


def _text(recipe: Any) -> str:  # Any: JSON
    return " ".join(f"{key}={plain(value)}" for key, value in flat(recipe))

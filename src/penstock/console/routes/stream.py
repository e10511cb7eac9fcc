"""Route of server-sent events: new points of curves, changed rows of the table, deleted runs, and resets.

One stream serves all windows of a browser (page/stream.js). It goes on from the cursors of what they have, so
nothing is missing that is recorded while a page opens, or is not connected; `at` says how far a run was sent.
Files are looked at four times a second, so a point arrives well within a second of its line; those of runs in
object stores apart from the others, which do not wait for them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from penstock.console.state import Console, ConsoleState, finite
from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.obs.run_data.columns import Cursor, RunData
from penstock.obs.run_data.curves import AXES, axis_of
from penstock.obs.run_data.discover import FoundRun, UnknownRun
from penstock.obs.run_data.events import first_compared, spikes
from penstock.obs.run_data.run_row import RunRow

router = APIRouter(prefix="/api")

_LOOK_EVERY_S = 0.25
_ROWS_EVERY = 4
"""Looks for points between looks for rows."""
_QUIET_LOOKS = 40
"""Looks without an event after which a comment is sent: proxies close idle streams."""
_MAX_RUNS = 64
"""Eight windows with comparisons of eight runs."""
_MAX_POINTS = 500
"""More at once are not a live curve: the page is told to fetch it."""
_PARSE_S = 1.0


@router.get("/stream")
async def stream(console: Console, runs: str = "", since: str = "") -> StreamingResponse:
    """Stream events of some runs, ids separated by commas; without them, the changed rows of all runs.

    `since` has the cursors of what the page has of these runs, in their order; without it, it has all. A run
    that is named twice, by windows of which one has less, is sent from there on.
    """
    cursors = _least([run_id for run_id in runs.split(",") if run_id], since.split(","))
    return StreamingResponse(_events(console, cursors), media_type="text/event-stream")


def _least(ids: Sequence[str], since: Sequence[str]) -> dict[str, Cursor | None]:
    """Return the least cursor of each run.

    >>> _least(["a", "b", "a"], ["0.9.0.0.0.0", "", "0.7.0.0.0.0"])
    {'a': Cursor(generation=0, steps=7, validations=0, tasks=0, events=0, samples=0), 'b': None}
    """
    found: dict[str, Cursor | None] = {}
    for run_id, text in zip_longest(ids, since[: len(ids)], fillvalue=""):
        if run_id not in found and len(found) == _MAX_RUNS:
            continue
        cursors = [Cursor.parsed(text) if text else None, found.get(run_id)]
        found[run_id] = min((cursor for cursor in cursors if cursor is not None), default=None)
    return found


async def _events(console: ConsoleState, cursors: Mapping[str, Cursor | None]) -> AsyncIterator[str]:
    runs = await run_in_threadpool(console.folders.runs)
    stored = {run.id for run in runs if run.files.is_stored}
    watched = {run_id: _Watched(console, run_id, since) for run_id, since in cursors.items()}
    local = _Looks([each for run_id, each in watched.items() if run_id not in stored])
    remote = _Looks([each for run_id, each in watched.items() if run_id in stored], most_s=_LOOK_EVERY_S)
    rows = _Rows(console, list(cursors))
    yield ": connected\n\n"
    look, quiet = 0, 0
    while not console.is_ending:
        found = [*await local.news(), *await remote.news()]
        if look % _ROWS_EVERY == 0:
            found += await run_in_threadpool(rows.news)
        quiet = 0 if found else quiet + 1
        if found:
            yield "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in found)
        elif quiet % _QUIET_LOOKS == 0:
            yield ": still here\n\n"
        look += 1
        await asyncio.sleep(_LOOK_EVERY_S)


News = list[tuple[str, Any]]  # Any: JSON


class _Watched:
    """One run of a stream: what was sent of it.

    Args:
        since: cursor of what the page has; None: all.
    """

    def __init__(self, console: ConsoleState, run_id: str, since: Cursor | None) -> None:
        self._console = console
        self._id = run_id
        self._sent = since

    def news(self) -> News:
        try:
            run = self._console.folders.run(self._id)
        except UnknownRun:  # deleted: `_Rows` says so
            return []
        try:
            return self._news_of(run)
        except PenstockError:  # the routes that a page asks first say why
            return []

    def _news_of(self, run: FoundRun) -> News:
        columns = self._console.columns(run, most_s=_PARSE_S)
        now = columns.cursor
        before = self._sent or now
        new = {table: number - before.rows[table] for table, number in now.rows.items()}
        found: News = []
        if now.generation != before.generation or min(new.values()) < 0 or sum(new.values()) > _MAX_POINTS:
            found.append(("reset", {"run": self._id, "generation": now.generation}))
        elif now != before:
            price = self._console.summaries.price(run)
            for table, first in before.rows.items():
                found += _points(self._id, columns, table, first, price=price)
            if now.events != before.events or _has_spike(columns, before.steps):
                found.append(("event", {"run": self._id}))
            if now.samples != before.samples:
                found.append(("samples", {"run": self._id}))
        if now != before:
            found.append(("at", {"run": self._id, "cursor": str(now)}))
        self._sent = now  # nothing was refused
        return found


class _Looks:
    """Looks at some runs, one after the other; a look that takes long is left to go on.

    Args:
        most_s: seconds to wait for a look; None: to its end.
    """

    def __init__(self, runs: Sequence[_Watched], *, most_s: float | None = None) -> None:
        self._runs, self._most_s = runs, most_s
        self._look: asyncio.Task[News] | None = None

    async def news(self) -> News:
        """Return what a look found, of this call or an earlier one; nothing while it goes on."""
        if not self._runs:
            return []
        if self._look is None:
            self._look = asyncio.create_task(run_in_threadpool(self._news))
        done, _ = await asyncio.wait([self._look], timeout=self._most_s)
        if not done:
            return []
        look, self._look = self._look, None
        return look.result()

    def _news(self) -> News:
        return [event for each in self._runs for event in each.news()]


class _Rows:
    """Rows of a stream's runs, as they were sent."""

    def __init__(self, console: ConsoleState, ids: list[str]) -> None:
        self._console = console
        self._ids = ids
        self._sent: dict[str, RunRow | None] | None = dict.fromkeys(ids) if ids else None
        """None: the first look sends a reset, upon which the table is read again. Of runs that a page names
        it sends all rows. Either way some may have changed, or be gone, since the page asked for them."""

    def news(self) -> News:
        now: dict[str, RunRow | None] = {row["id"]: row for row in self._rows()}
        before, self._sent = self._sent, now
        if before is None:
            return [("reset", {})]
        gone: News = [("gone", {"id": run_id}) for run_id in before if run_id not in now]
        return [*gone, *(("row", row) for run_id, row in now.items() if before.get(run_id) != row)]

    def _rows(self) -> Iterator[RunRow]:
        if not self._ids:
            yield from self._console.rows(most_s=_LOOK_EVERY_S)
            return
        until = clock.monotonic() + _LOOK_EVERY_S  # for all of them together
        for run in self._console.folders.runs():
            if run.id in self._ids:
                yield self._console.row(run, most_s=max(0.0, until - clock.monotonic()))


def _has_spike(columns: RunData, row: int) -> bool:
    """Return whether the loss of a step from a row on is a spike, without a look at the whole curve."""
    first = first_compared(row)
    steps, loss = (columns.column(name, first=first) for name in ("step", "loss"))
    return any(spike["step"] in steps[row - first :] for spike in spikes(steps, loss))


def _points(run_id: str, columns: RunData, table: str, first: int, *, price: float) -> News:
    """Return the points of a table from a row on."""
    past = columns.num_rows(table)
    if first >= past:
        return []
    named = {name: columns.column(name, table=table, first=first) for name in columns.metrics()
             if columns.table_of(name) == table}  # fmt: skip
    axes = {x: axis_of(columns, x, table=table, price=price)[first:] for x in AXES}
    return [
        (
            "points",
            {
                "run": run_id,
                "x": {x: finite(float(values[row])) for x, values in axes.items()},
                "values": {name: finite(float(values[row])) for name, values in named.items()},
            },
        )
        for row in range(past - first)
    ]

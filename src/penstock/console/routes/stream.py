"""Route of server-sent events: new points of curves, changed rows of the table, deleted runs, and resets.

One stream serves a page, whatever it shows. Files are looked at four times a second, so a point arrives well
within a second of its line.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from penstock.console.routes.curves import Axis, axis_of
from penstock.console.runs.columns import TABLES, RunColumns
from penstock.console.runs.discover import FoundRun, UnknownRun
from penstock.console.runs.summary import RunRow
from penstock.console.state import ConsoleState, console_of, finite
from penstock.core.errors import PenstockError

router = APIRouter(prefix="/api")

_LOOK_EVERY_S = 0.25
_ROWS_EVERY = 4
"""Looks for points between looks for rows."""
_QUIET_LOOKS = 40
"""Looks without an event after which a comment is sent: proxies close idle streams."""
_MOST_RUNS = 16
_MOST_POINTS = 500
"""More at once are not a live curve: the page is told to fetch it."""
_PARSE_S = 1.0


@router.get("/stream")
async def stream(request: Request, runs: str = "") -> StreamingResponse:
    """Stream events of some runs, ids separated by commas; without them, the changed rows of all runs."""
    console = console_of(request)
    ids = [run_id for run_id in runs.split(",") if run_id][:_MOST_RUNS]
    return StreamingResponse(_events(console, ids), media_type="text/event-stream")


async def _events(console: ConsoleState, ids: list[str]) -> AsyncIterator[str]:
    watched = [_Watched(console, run_id) for run_id in ids]
    rows = _Rows(console, ids)
    yield ": connected\n\n"
    look, quiet = 0, 0
    while not console.is_ending:
        found = [event for each in watched for event in await run_in_threadpool(each.news)]
        if look % _ROWS_EVERY == 0:
            found += await run_in_threadpool(rows.news)
        quiet = 0 if found else quiet + 1
        if found:
            yield "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in found)
        elif quiet % _QUIET_LOOKS == 0:
            yield ": still here\n\n"
        look += 1
        await asyncio.sleep(_LOOK_EVERY_S)


_AXES: tuple[Axis, ...] = ("step", "tokens", "time", "money")

News = list[tuple[str, Any]]  # Any: JSON


class _Watched:
    """One run of a stream: what was sent of it."""

    def __init__(self, console: ConsoleState, run_id: str) -> None:
        self._console = console
        self._id = run_id
        self._sent: dict[str, int] | None = None
        self._generation = 0
        self._num_events = 0

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
        now = {table: columns.num_rows(table) for table in TABLES}
        generation, num_events = columns.generation, len(columns.events)
        before, is_void = self._sent, generation != self._generation
        points: News = []
        new = 0 if before is None else sum(now.values()) - sum(before.values())
        if before is not None and not is_void and new <= _MOST_POINTS:
            price = self._console.summaries.price(run)
            points = [
                point
                for table in TABLES
                for point in _points(self._id, columns, table, before[table], price=price)
            ]
        changed = num_events != self._num_events
        self._sent, self._generation, self._num_events = now, generation, num_events  # nothing was refused
        if before is None:
            return []
        if is_void or new > _MOST_POINTS:
            return [("reset", {"run": self._id, "generation": generation})]
        events = [("event", {"run": self._id, "events": columns.events[-1:]})] if changed else []
        return [*points, *events]


class _Rows:
    """Rows of a stream's runs, as they were sent."""

    def __init__(self, console: ConsoleState, ids: list[str]) -> None:
        self._console = console
        self._ids = ids
        self._sent: dict[str, RunRow | None] | None = dict.fromkeys(ids) if ids else None
        """None: the first look sends nothing. Of runs that a page names it sends all rows: some may have
        changed, or be gone, since the page asked for them."""

    def news(self) -> News:
        now: dict[str, RunRow | None] = {row["id"]: row for row in self._rows()}
        before, self._sent = self._sent, now
        if before is None:
            return []
        gone: News = [("gone", {"id": run_id}) for run_id in before if run_id not in now]
        return [*gone, *(("row", row) for run_id, row in now.items() if before.get(run_id) != row)]

    def _rows(self) -> Iterator[RunRow]:
        if not self._ids:
            yield from self._console.rows()
            return
        for run in self._console.folders.runs():
            if run.id in self._ids:
                yield self._console.row(run)


def _points(run_id: str, columns: RunColumns, table: str, first: int, *, price: float) -> News:
    """Return the points of a table from a row on."""
    past = columns.num_rows(table)
    if first >= past:
        return []
    named = {name: columns.column(name, table=table, first=first) for name in columns.metrics()
             if columns.table_of(name) == table}  # fmt: skip
    axes = {x: axis_of(columns, x, table=table, price=price)[first:] for x in _AXES}
    number = min(past - first, *map(len, axes.values()), *map(len, named.values()))
    return [
        (
            "points",
            {
                "run": run_id,
                "x": {x: finite(float(values[row])) for x, values in axes.items()},
                "values": {name: finite(float(values[row])) for name, values in named.items()},
            },
        )
        for row in range(number)
    ]

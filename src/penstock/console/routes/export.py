"""Routes of files to take along: a view as one HTML file, its metrics as CSV or Parquet.

An HTML file is what `penstock report` writes. Files are sent as attachments: opened as a page of the console,
their scripts would be refused.
"""

import io
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

import pyarrow as pa
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.console.runs.discover import FoundRun
from penstock.console.runs.export import Pieces, exported, written
from penstock.console.runs.rank_columns import check_rank_metric, reported_ranks
from penstock.console.runs.run_files import tokenizer_of
from penstock.console.runs.step_rows import FIRST_ROWS, MOST_ROWS, open_rows, rows_as_json
from penstock.console.runs.summary import RunRow
from penstock.console.servers.charts import render_servers, rows_of
from penstock.console.servers.history import POINT_FIELDS
from penstock.console.state import ConsoleState, console_of, run_of
from penstock.core.errors import PenstockError, UsageError
from penstock.core.units import duration, short
from penstock.obs.metric_names import METRICS_FILE, RANK_METRICS
from penstock.obs.report.compare import MOST_RUNS, ComparedRun, render_comparison
from penstock.obs.report.history import gather, records_in
from penstock.obs.report.html import page, section
from penstock.obs.report.report import render
from penstock.obs.report.rows import ReportedRows
from penstock.obs.report.summary import UNKNOWN

router = APIRouter(prefix="/api")

FileFormat = Literal["html", "csv", "parquet"]
_MEDIA = {"html": "text/html; charset=utf-8", "csv": "text/csv; charset=utf-8",
          "parquet": "application/vnd.apache.parquet"}  # fmt: skip
_ORDER = ("training", "stalled", "failed", "stopped", "finished")
_COLUMNS = (
    "name", "state", "step", "steps", "loss", "tokens", "tokens_per_s", "mfu", "data_wait", "exposed",
    "eta_s", "cost", "ranks", "started", "updated", "path", "error",
)  # fmt: skip
"""Columns of the table's files."""
_TEXTS = frozenset(("name", "state", "started", "path", "error"))
_DIGITS = re.compile(r"([0-9]+)")
_LAST_NAME = re.compile(r"[\\/][^\\/]*$")
_READ_BYTES = 8 << 20
"""Bytes of a request to an object store."""
_SHARES = frozenset(("mfu", "data_wait", "exposed"))


@router.get("/runs/{run_id}/export.{form}")
def export_run(
    request: Request,
    run_id: str,
    form: FileFormat,
    metrics: str = "",
    metric: str = next(iter(RANK_METRICS)),
    step: int | None = None,
    row: Annotated[int, Query(ge=0, le=10**9)] = 0,
    rows: Annotated[int, Query(ge=1, le=MOST_ROWS)] = FIRST_ROWS,
) -> Response:
    """Return a run: its report, or all steps of some metrics, named with commas between; of none, all.

    The report has the heat map of the ranks, `metric` at first, and `rows` rows of a step from `row` on.
    """
    console, run = console_of(request), run_of(request, run_id)
    if form == "html":
        check_rank_metric(metric)
        with _records(run) as file:
            text = render(
                records_in(file),
                console.summaries.recipe(run),
                name=run.name,
                ranks=reported_ranks(
                    lambda name: console.rank_columns(run, name, most_s=math.inf),
                    first=metric,
                    has_others=not run.files.is_stored,  # stores bill what is read
                ),
                rows=ReportedRows() if step is None else _rows(console, run, step, row=row, limit=rows),
            )
        return _attached(text.encode(), run.name, form)
    return _attached(
        exported({run.name: console.columns(run, most_s=math.inf)}, _listed(metrics), form=form),
        run.name,
        form,
    )


@router.get("/export.{form}")
def export_runs(request: Request, form: FileFormat, runs: str, metrics: str = "") -> Response:
    """Return several runs, their ids with commas between: their comparison, or all steps of some metrics."""
    console = console_of(request)
    found = [run_of(request, run_id) for run_id in dict.fromkeys(_listed(runs))]
    if not 2 <= len(found) <= MOST_RUNS:
        raise UsageError(f"A comparison has 2 to {MOST_RUNS} runs", got=len(found), fix="Choose others.")
    if form == "html":
        compared = [_compared(run, console.summaries.recipe(run)) for run in found]
        return _attached(render_comparison(compared).encode(), "compared", form)
    columns = {run.name: console.columns(run, most_s=math.inf) for run in found}
    return _attached(exported(columns, _listed(metrics), form=form), "compared", form)


@router.get("/table.{form}")
def export_table(
    request: Request,
    form: FileFormat,
    search: str = "",
    states: str = "",
    sort: str = "updated",
    down: bool = True,
    group: Literal["", "state", "folder", "ranks"] = "",
) -> Response:
    """Return the table of runs as it is filtered, sorted and grouped on the page (see table.js)."""
    if sort not in _COLUMNS:
        raise UsageError("The table has no such column", got=sort, fix=f"Columns: {', '.join(_COLUMNS)}.")
    shown = set(_listed(states))
    rows = [
        row for row in console_of(request).rows(search, most_s=None) if not shown or row["state"] in shown
    ]
    rows = _grouped(_sorted(rows, sort, is_down=down), group)
    if form == "html":
        cells = [[_cell(name, row[name]) for name in _COLUMNS] for row in rows]  # type: ignore[literal-required]
        titles = [name.replace("_", " ") for name in _COLUMNS]
        return _attached(page("Penstock runs", [section("Runs", titles, cells)]).encode(), "runs", form)
    kinds = [(name, pa.string() if name in _TEXTS else pa.float64()) for name in _COLUMNS]
    batch = pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=pa.schema(kinds))
    return _attached(written([batch], batch.schema, form=form), "runs", form)


@router.get("/servers.{form}")
def export_servers(request: Request, form: FileFormat) -> Response:
    """Return what was read of all servers so far: their charts, or every reading. No server is asked."""
    servers = console_of(request).servers
    rows = [*rows_of(servers)]
    if not rows:
        raise UsageError("No server was read yet", fix="Open the page of the servers first.")
    if form == "html":
        return _attached(render_servers(servers).encode(), "servers", form)
    kinds = [("server", pa.string()), *((name, pa.float64()) for name in POINT_FIELDS)]
    batch = pa.RecordBatch.from_pylist(rows, schema=pa.schema(kinds))
    return _attached(written([batch], batch.schema, form=form), "servers", form)


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _records(run: FoundRun) -> BinaryIO:
    """Open the records of a run to be read line by line; an object's come in large pieces.

    Raises:
        UsageError: there are none yet, or they cannot be read.
    """
    try:
        return io.BufferedReader(run.files.open(METRICS_FILE), _READ_BYTES)  # type: ignore[type-var]
    except OSError as error:
        raise UsageError("The run has no records that can be read", got=run.name, fix=str(error)) from None


def _rows(console: ConsoleState, run: FoundRun, step: int, *, row: int, limit: int) -> ReportedRows:
    """Return rows for a report; where they cannot be read, the report says why."""
    try:
        opened, found = open_rows(run.folder, step, offset=row, limit=limit)
        if not found.rows:
            return ReportedRows(why_none=f"Step {step:,} has {found.num_rows:,} rows, and no row {row:,}.")
        columns = console.columns(run)
        losses = console.losses.of((run.id, columns.generation), found)
        return ReportedRows(found=rows_as_json(opened, found, columns, offset=row, losses=losses))
    except PenstockError as error:
        return ReportedRows(why_none=str(error))


def _compared(run: FoundRun, recipe: Any) -> ComparedRun:  # Any: JSON
    with _records(run) as file:
        return ComparedRun(run.name, gather(records_in(file)), recipe, tokenizer=tokenizer_of(run.files))


def _sorted(rows: Iterable[RunRow], sort: str, *, is_down: bool) -> list[RunRow]:
    """Return rows in an order; what is unknown comes last either way."""
    known: list[RunRow] = []
    unknown: list[RunRow] = []
    for row in rows:
        (unknown if row[sort] in (None, "") else known).append(row)  # type: ignore[literal-required]
    known.sort(key=lambda row: _place(row, sort), reverse=is_down)
    return [*known, *unknown]


def _place(row: RunRow, sort: str) -> Any:  # Any: what rows are compared by
    value = row[sort]  # type: ignore[literal-required]
    if sort == "state":
        return _ORDER.index(value)
    return natural(value) if isinstance(value, str) else value


def natural(text: str) -> list[bytes | tuple[int, str]]:
    """Return what texts are ordered by: letters of either case together, numbers by their size.

    >>> sorted(["run-10", "Run-9", "run-9b"], key=natural)
    ['Run-9', 'run-9b', 'run-10']
    """
    parts: list[bytes | tuple[int, str]] = []
    for place, part in enumerate(_DIGITS.split(text.lower())):
        digits = part.lstrip("0")
        parts.append((len(digits), digits) if place % 2 else part.encode("utf-16-be", "surrogatepass"))
    return parts


def _grouped(rows: list[RunRow], group: str) -> list[RunRow]:
    """Return rows by groups, in the order of the groups' first rows."""
    groups: dict[Any, list[RunRow]] = {}
    for row in rows:
        own = _LAST_NAME.sub("", row["path"]) if group == "folder" else row[group] if group else None  # type: ignore[literal-required]
        groups.setdefault(own, []).append(row)
    return [row for members in groups.values() for row in members]


def _cell(name: str, value: Any) -> str:  # Any: of a row
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return value
    if name == "updated":
        return datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    if name == "eta_s":
        return duration(value)
    return (
        f"{value:,}"
        if isinstance(value, int)
        else short(value, unit="share" if name in _SHARES else "number")
    )


class _Written(StreamingResponse):
    """File that is written while it is sent; its writer ends with the response, also if that breaks off.

    Otherwise only the garbage collector would end it, after many broken downloads.
    """

    def __init__(self, pieces: Pieces, *, media_type: str, headers: dict[str, str]) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with suppress(ValueError):  # the server ends, and a thread still writes a piece
                self._pieces.close()


def _attached(content: bytes | Pieces, name: str, form: FileFormat) -> Response:
    """Return a file for the reader's disk."""
    file = quote(f"{name.replace('/', '-')}.{form}", safe="")
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{file}"}
    if isinstance(content, bytes):
        return Response(content, media_type=_MEDIA[form], headers=headers)
    return _Written(content, media_type=_MEDIA[form], headers=headers)

"""Columns of runs as CSV and Parquet, piece by piece: every record, none thinned, memory that does not grow.

A row is a step, or a step of one of several runs. Records of validations and tasks stand in the row of their
step. A spreadsheet computes what begins like a formula: in CSV such a text gets an apostrophe before it.
"""

import io
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.obs.run_data.columns import RunData
from penstock.obs.thin import Float64

TableFormat = Literal["csv", "parquet"]
Pieces = Generator[bytes, None, None]
"""Bytes of a file, in order; whoever does not read them to their end closes it."""

_ROWS = 1 << 13
"""Rows of a piece: 64 KB for each metric. Each of some 40 downloads at once holds one, and as text."""
_RUN = "run"
"""Column of the runs' names, if there are several."""
_FORMULA = re.compile(r"^[=+\-@\t\r]")


def exported(runs: Mapping[str, RunData], metrics: Sequence[str], *, form: TableFormat) -> Pieces:
    """Return the pieces of a file with all steps of some runs.

    Args:
        runs: name -> columns; the names are a column if there are several.
        metrics: names of columns; (): all.

    Raises:
        PenstockError: no run has such a metric, or a step; raised at once, not by the first piece.
    """
    known = [
        *dict.fromkeys(name for columns in runs.values() for name in columns.metrics() if name != "step")
    ]
    if not known:
        raise PenstockError("The run has not recorded a step yet", fix="Try again after its first step.")
    names = [*dict.fromkeys(name for name in metrics if name != "step")] or known
    for name in names:
        if name not in known:
            raise UsageError("There is no such metric", got=name, fix=nearest(name, known))
    schema = pa.schema([("step", pa.int64()), *((name, pa.float64()) for name in names)])
    if len(runs) > 1:
        schema = schema.insert(0, pa.field(_RUN, pa.string()))
    return written(_batches(runs, names, schema), schema, form=form)


def written(batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, form: TableFormat) -> Pieces:
    """Yield the bytes of a file with some record batches."""
    sink = _Sink()
    # Without compression in Parquet the pieces of a long run would be ten times as large.
    if form == "csv":
        safe = pa.schema([field.with_name(_as_text(field.name)) for field in schema])
        writer = pacsv.CSVWriter(sink, safe)
        batches = (_safe(batch, safe) for batch in batches)
    else:
        writer = pq.ParquetWriter(sink, schema, compression="zstd")
    with writer:
        for batch in batches:
            writer.write_batch(batch)
            yield sink.taken()
    yield sink.taken()


def rows_by_step(columns: RunData, metrics: Sequence[str]) -> Iterator[dict[str, Float64]]:
    """Yield pieces of the columns "step" and `metrics`; a row for each step that has a record of them."""
    tables: dict[str, list[str]] = {}
    for name in metrics:
        tables.setdefault(columns.table_of(name), []).append(name)
    values = {
        table: {name: columns.column(name, table=table) for name in ("step", *names)}
        for table, names in tables.items()
    }
    at = dict.fromkeys(values, 0)
    ends = {table: len(of["step"]) for table, of in values.items()}
    while left := [table for table in values if at[table] < ends[table]]:
        full = {table: min(at[table] + _ROWS, ends[table]) for table in left}
        ahead = min(left, key=lambda table: values[table]["step"][full[table] - 1])
        last = values[ahead]["step"][full[ahead] - 1]
        parts = {}
        for table in left:
            of = values[table]
            stop = at[table] + int(np.searchsorted(of["step"][at[table] : ends[table]], last, side="right"))
            if table == ahead:  # also where steps of a damaged file are in no order
                stop = max(stop, full[table])
            parts[table] = {name: column[at[table] : stop] for name, column in of.items()}
            at[table] = stop
        steps = np.unique(np.concatenate([part["step"] for part in parts.values()]))
        piece = {"step": steps, **{name: np.full(len(steps), np.nan) for name in metrics}}
        for part in parts.values():
            places = np.searchsorted(steps, part["step"])
            for name, column in part.items():
                known = ~np.isnan(column)
                piece[name][places[known]] = column[known]
        yield piece


def _batches(
    runs: Mapping[str, RunData], names: Sequence[str], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for run, columns in runs.items():
        own = set(columns.metrics())
        for piece in rows_by_step(columns, [name for name in names if name in own]):
            number = len(piece["step"])
            arrays = {"step": pa.array(piece["step"].astype(np.int64))}
            for name in names:
                there = name in piece
                arrays[name] = (
                    pa.array(piece[name], from_pandas=True) if there else pa.nulls(number, pa.float64())
                )
            arrays[_RUN] = pa.array([run] * number)
            yield pa.record_batch([arrays[name] for name in schema.names], schema=schema)


def _safe(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        pa.array([value if value is None else _as_text(value) for value in column.to_pylist()])
        if pa.types.is_string(column.type)
        else column
        for column in batch.columns
    ]
    return pa.record_batch(columns, schema=schema)


def _as_text(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula.

    >>> _as_text("=HYPERLINK(1)"), _as_text("loss")
    ("'=HYPERLINK(1)", 'loss')
    """
    return f"'{text}" if _FORMULA.match(text) else text


class _Sink(io.RawIOBase):
    """File that is handed over in pieces."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def close(self) -> None:
        """Stay open: what is left is taken after the writer has ended."""

    def taken(self) -> bytes:
        found, self._parts = b"".join(self._parts), []
        return found

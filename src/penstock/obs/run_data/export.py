"""Steps of runs as a CSV or Parquet file: every record, none thinned.

A row is a step, or a step of one of several runs. Records of validations and tasks stand in the row of their
step. A spreadsheet computes what begins like a formula: in CSV such a text gets an apostrophe before it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.obs.run_data.columns import RunData

TableFormat = Literal["csv", "parquet"]

_RUN = "run"
"""Column of the runs' names, if there are several."""
_FORMULA = re.compile(r"^[=+\-@\t\r]")


def write_steps(
    path: Path, runs: Mapping[str, RunData], metrics: Sequence[str], *, form: TableFormat
) -> None:
    """Write all steps of some runs to a file, one run after the other.

    Args:
        runs: name -> columns; the names are a column if there are several.
        metrics: names of columns; (): all.

    Raises:
        PenstockError: no run has such a metric, or a step; no file is made.
    """
    known = [*dict.fromkeys(name for data in runs.values() for name in data.metrics() if name != "step")]
    if not known:
        raise PenstockError("The run has not recorded a step yet", fix="Try again after its first step.")
    names = [*dict.fromkeys(name for name in metrics if name != "step")] or known
    for name in names:
        if name not in known:
            raise UsageError("There is no such metric", got=name, fix=nearest(name, known))
    shown = _as_text if form == "csv" else str
    titles = [*([_RUN] if len(runs) > 1 else []), "step", *map(shown, names)]
    kinds = [*([pa.string()] if len(runs) > 1 else []), pa.int64(), *[pa.float64()] * len(names)]
    schema = pa.schema([*zip(titles, kinds, strict=True)])
    with (
        pacsv.CSVWriter(path, schema)
        if form == "csv"
        else pq.ParquetWriter(path, schema, compression="zstd") as writer
    ):
        for run, data in runs.items():
            columns = _by_step(data, names)
            first = [pa.array([shown(run)] * len(columns[0]))] if len(runs) > 1 else []
            writer.write_table(pa.table([*first, *columns], schema=schema))


def _by_step(data: RunData, metrics: Sequence[str]) -> list[pa.Array]:
    """Return the steps that have a record of some metrics, and each metric's values at them."""
    tables = {name: data.table_of(name) for name in metrics if name in data.metrics()}
    steps = {table: data.column("step", table=table) for table in tables.values()}
    rows = np.unique(np.concatenate([np.empty(0), *steps.values()]))
    found = [pa.array(rows.astype(np.int64))]
    for name in metrics:
        values = np.full(len(rows), np.nan)
        if name in tables:
            column = data.column(name, table=tables[name])
            known = ~np.isnan(column)
            values[np.searchsorted(rows, steps[tables[name]][known])] = column[known]
        found.append(pa.array(values, from_pandas=True))
    return found


def _as_text(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula.

    >>> _as_text("=HYPERLINK(1)"), _as_text("loss")
    ("'=HYPERLINK(1)", 'loss')
    """
    return f"'{text}" if _FORMULA.match(text) else text

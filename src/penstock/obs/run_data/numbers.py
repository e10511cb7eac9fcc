"""Numbers of records as columns: by pyarrow where the records are alike, else one by one."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pajson

from penstock.obs.metric_names import BY_CORPUS, BY_TASK
from penstock.obs.sinks import Record
from penstock.obs.thin import Float64

_TABLE_METRICS = frozenset((*BY_CORPUS, *BY_TASK))
_NUMBERS = {float, int}
_MAX_STEPS = 2**53

try:
    from pydantic_core import from_json

    _decoded: Callable[[bytes], Any] = partial(from_json, cache_strings="keys")  # a quarter of json's time
except ImportError:  # `penstock report` without the packages of the server
    _decoded = json.loads


def parsed(line: bytes) -> Record | None:
    """Return the record of a line; None: it is none."""
    try:
        record = _decoded(line)
    except (ValueError, RecursionError):
        try:
            record = json.loads(line)  # some lines only this takes: those with a lone surrogate
        except (ValueError, RecursionError):
            return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and abs(step) < _MAX_STEPS else None


def columns_of_steps(content: bytes) -> dict[str, Float64] | None:
    """Return the numbers of lines that are all records of steps, [lines] each; None: they are not so alike.

    Args:
        content: lines, each with its end.
    """
    options = pajson.ReadOptions(use_threads=False, block_size=len(content))  # one block: no inference twice
    try:
        table = pajson.read_json(pa.BufferReader(content), read_options=options)
    except pa.ArrowInvalid:
        return None
    for name in ("step", "loss"):
        if name not in table.column_names or table[name].null_count:
            return None
    if table.num_rows != content.count(b"\n") or table["step"].type != pa.int64():
        return None
    found = {name: _as_numbers(column) for name, column in _numeric(table)}
    return found if np.abs(found["step"]).max(initial=0) < _MAX_STEPS else None


def _numeric(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    for name, column in zip(table.column_names, table.columns, strict=True):
        if _is_numeric(column.type):
            yield name, column
        elif name in _TABLE_METRICS and pa.types.is_struct(column.type):
            for of, own in zip(column.type, column.flatten(), strict=True):
                if _is_numeric(of.type):
                    yield f"{name}/{of.name}", own


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _as_numbers(column: pa.ChunkedArray) -> Float64:
    return np.asarray(column.to_numpy(), np.float64)  # integers with nulls are floats there


def columns_of_records(records: Sequence[Record]) -> dict[str, Float64]:
    """Return the numbers of some records, [records] each; NaN where a record has none.

    >>> columns_of_records([{"loss": 2.5, "corpus_tokens": {"web": 8}}, {"loss": None}])
    {'loss': array([2.5, nan]), 'corpus_tokens/web': array([ 8., nan])}
    """
    found: dict[str, Float64] = {}
    for name, values in _by_name(records).items():
        if name in _TABLE_METRICS:
            tables = [value if isinstance(value, dict) else {} for value in values]
            for of, each in _by_name(tables).items():
                _put(found, f"{name}/{of}", each)
        _put(found, name, values)
    return found


def seconds(value: Any) -> float:  # Any: JSON
    """Return a duration of a record; 0 where it has none."""
    found = _float(value)
    return found if 0 <= found < math.inf else 0.0


def _by_name(records: Sequence[Record]) -> Mapping[str, Sequence[Any]]:  # Any: JSON
    """Return the values of some records, [records] each; None where a record has none."""
    first = records[0]
    if len(first) > 1 and all(record.keys() == first.keys() for record in records):  # as almost always
        return dict(zip(first, zip(*map(itemgetter(*first), records), strict=True), strict=True))
    names = dict.fromkeys(chain.from_iterable(records))
    return {name: [record.get(name) for record in records] for name in names}


def _put(found: dict[str, Float64], name: str, values: Sequence[Any]) -> None:  # Any: JSON
    """Put numbers among the columns, if there is one among the values."""
    if _NUMBERS & set(map(type, values)):
        found[name] = np.array([_float(value) for value in values], dtype="<f8")


def _float(value: Any) -> float:  # Any: JSON
    try:
        return float(value) if type(value) in _NUMBERS else math.nan
    except OverflowError:  # an integer beyond any float
        return math.nan

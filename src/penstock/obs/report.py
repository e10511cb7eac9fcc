"""A report: the console's page of one run, or of several, as one HTML file with its data inlined.

    files of a run -> the JSON of the console's routes (run_data/page_json) -> inlined; page/*.js draw it

The file fetches nothing: its content security policy allows the scripts and styles that are in it, by their
hashes, and no others. However long a run is, its curves and heat maps are thinned to some megabytes at most.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from heapq import nlargest
from html import escape
from importlib.resources import files
from itertools import product
from string import Template
from typing import Any

import numpy as np
import pybase64

from penstock.core import clock
from penstock.core.units import plural
from penstock.obs.metric_names import RANK_METRICS
from penstock.obs.run_data.columns import RunData
from penstock.obs.run_data.curves import AXES, axis_of, sampled
from penstock.obs.run_data.discover import FoundRun
from penstock.obs.run_data.hangs import HangReports
from penstock.obs.run_data.page_json import (
    answers_json,
    comparison_json,
    hangs_json,
    plain_json,
    run_json,
)
from penstock.obs.run_data.rank_columns import RankColumns, RankPlaces, RankTable
from penstock.obs.run_data.run_row import RunRow
from penstock.obs.run_data.summary import Config
from penstock.obs.thin import Float64

MAX_RUNS = 8
"""Maximum number of runs in one file: as many as there are distinguishable colours."""

Reply = dict[str, Any]  # Any: JSON values

_POINTS = 600
"""Points of a chart: of more records some are left out."""
_MAX_LAYERS = 40
"""Curves of a chart: of more corpora or tasks, those with the highest last values are drawn."""
_MAX_EVENTS = 1000
_MAX_NAME_CHARACTERS = 1 << 20
"""Of hosts, devices and network interfaces; where ranks of older starts ran is left out beyond."""
_RANK_CELLS = 384 << 10
"""Values of the metric of ranks that is shown first: 384 columns of 1,024 ranks, 2 MB as text."""
_OTHER_RANK_CELLS = 256 << 10
"""The same of all other metrics of ranks together."""
_RANK_COLUMNS = 1000
_MIN_COLUMNS = 16
"""A metric of ranks of which a report had fewer is left out."""
_LARGEST_INTEGER = 1e15
_IMPORT = re.compile(r'^import (?:\* as )?(\w+|\{.*\}) from "\./(.+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:const|class|function) (\w+))", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """Run of a report."""

    found: FoundRun
    row: RunRow
    data: RunData
    recipe: Config
    price: float = 0.0
    """Of a device-hour; 0: unknown."""
    ranks: Mapping[str, RankTable] = field(default_factory=dict)
    """Values by metric of RANK_METRICS; the page opens with the first one. {}: none were recorded."""
    ranks_left_out: Sequence[str] = ()
    """Metrics of ranks that would make the file too large, or take too long to read."""
    hangs: HangReports = field(default_factory=lambda: HangReports(hangs=(), unread=(), num_beyond=0))
    rows: Reply | None = None
    """Rows of a step, as the console's route answers; None: none."""
    references: Mapping[str, float] = field(default_factory=dict)
    """Name -> loss in nats per token, drawn as horizontal lines."""


def render(runs: Sequence[ReportedRun]) -> str:
    """Return the page of one run, or the comparison of 2 to MAX_RUNS runs and their pages."""
    assert 1 <= len(runs) <= MAX_RUNS, len(runs)
    inlined: Reply = {
        "runs": [_run(run, [other for other in runs if other is not run]) for run in runs],
        "comparison": comparison_json([(run.found, run.data, run.recipe) for run in runs]),
        "written": datetime.fromtimestamp(clock.unix_seconds(), UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    library = f"/*\n{_read('vendor/LICENSE')}*/\n{_read('vendor/uPlot.iife.min.js')}"
    script = _bundle("report.js")
    style = "".join(map(_read, ("vendor/uPlot.min.css", "charts.css", "views.css")))
    page = Template(_read("report.html")).substitute(
        title=escape(" \u00b7 ".join([*(run.found.name for run in runs), "Penstock"])),
        scripts=f"{_hash(library)} {_hash(script)}",
        styles=_hash(style),
        style=style,
        text=escape("\n\n".join(_text(one["run"]) for one in inlined["runs"])),
        runs=embedded(inlined),
        library=library,
        script=script,
    )
    return page.encode(errors="backslashreplace").decode()  # a recipe may name a folder that is no UTF-8


def ranks_of(
    columns_of: Callable[[str], RankColumns], *, has_others: bool = True
) -> tuple[dict[str, RankTable], list[str]]:
    """Return the metrics of a run's ranks for a report, some 4 MB as text, and the names of those left out.

    Args:
        columns_of: opens a metric; it may be closed by the next call.
        has_others: False: only the metric that is shown first. Each reads the whole file, once.
    """
    tables: dict[str, RankTable] = {}
    left_out: list[str] = []
    for number, metric in enumerate(RANK_METRICS):
        if number and not has_others:
            left_out.append(metric)
            continue
        cells = _OTHER_RANK_CELLS // (len(RANK_METRICS) - 1) if number else _RANK_CELLS
        table = columns_of(metric).table(columns=_RANK_COLUMNS, cells=cells)
        if number and len(table.steps) < min(table.num_records, _MIN_COLUMNS):
            left_out.append(metric)
        elif table.steps:
            tables[metric] = table
    return tables, left_out if tables else []


def embedded(value: Any) -> str:  # Any: JSON
    """Return JSON that no text in it can end the script element of.

    >>> embedded({"a": "</script>"})
    '{"a":"\\\\u003c/script>"}'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _run(run: ReportedRun, others: Sequence[ReportedRun]) -> Reply:
    """Return what the page reads of a run.

    Args:
        others: runs that it is compared with. The records at which they end are kept in its curves.
    """
    found = run_json(run.found, run.row, run.data, run.recipe)
    for chart in found["charts"]:
        if (number := len(chart["layers"])) > _MAX_LAYERS:
            chart["title"] += f": the highest {_MAX_LAYERS} of {number:,}"
            chart["layers"] = nlargest(
                _MAX_LAYERS, chart["layers"], lambda layer: _last(run.data, layer["metric"])
            )
    found["events"] = found["events"][-_MAX_EVENTS:]
    found["levels"] = [*run.references.items()]
    found["rows_step"] = run.rows and run.rows["step"]
    names = [[layer["metric"] for layer in chart["layers"]] for chart in found["charts"]]
    return {
        **plain_json(
            {
                "run": found,
                "rows": run.rows,
                "answers": answers_json(run.data),
                "hangs": hangs_json(run.hangs),
            }
        ),
        "curves": _curves(run, names, _ends(run, others)),
        "ranks": _ranks(run),
    }


def _last(data: RunData, metric: str) -> float:
    """Return the last value of a metric; a very low one if it is unknown."""
    return float(np.nan_to_num(data.column(metric, table=data.table_of(metric))[-1], nan=-np.inf))


def _curves(run: ReportedRun, charts: Sequence[Sequence[str]], kept_steps: Sequence[float]) -> list[Reply]:
    """Return the curves of each chart, a metric once, with its places on all axes."""
    steps, curves, seen = run.data.column("step"), [], set[str]()
    axes = {axis: axis_of(run.data, axis, price=run.price) for axis in AXES if run.price or axis != "money"}
    for names in charts:
        new = [name for name in names if name not in seen]
        seen |= {*new}
        found = sampled(run.data, new, "step", points=_POINTS, kept_steps=kept_steps)
        places = {
            axis: np.interp(found.x, steps, each) if len(steps) else found.x for axis, each in axes.items()
        }
        curves.append(
            {
                "x": {axis: _numbers(each, digits=10) for axis, each in places.items()},
                "series": {name: _numbers(each) for name, each in found.series.items()},
                "means": {name: _numbers(each) for name, each in found.means.items()},
            }
        )
    return curves


def _ends(run: ReportedRun, others: Sequence[ReportedRun]) -> list[float]:
    """Return the steps of a run at which others end: at the same step, tokens, time or money."""
    steps, found = run.data.column("step"), []
    for other, axis in product(others, AXES):
        own, its = (axis_of(one.data, axis, price=one.price) for one in (run, other))
        found.append(float(steps[np.searchsorted(own, its[-1] * (1 + 1e-9), side="right") - 1]))
    return found


def _numbers(values: Float64, *, digits: int = 7) -> list[float | None]:
    return [_rounded(value, digits) if math.isfinite(value) else None for value in values.tolist()]


def _rounded(value: float, digits: int) -> float:
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < _LARGEST_INTEGER else value


def _ranks(run: ReportedRun) -> Reply:
    """Return the metrics of the ranks, and where they ran: each name stands once in the page."""
    places = {each.first_row: each for table in run.ranks.values() for each in table.places.values()}
    names: dict[str, int] = {}
    kept = _kept([places[row] for row in sorted(places)], names)
    number = {each.first_row: index for index, each in enumerate(kept)}
    said = []
    if run.ranks_left_out:
        left_out = ", ".join(run.ranks_left_out)
        said.append(f"This file leaves out {left_out}, to stay small. `penstock console` shows them.")
    if len(kept) < len(places):
        said.append(
            f"This file names the places of ranks of the newest {len(kept)} of "
            f"{plural(len(places), 'start')}."
        )
    return {
        "shown": next(iter(run.ranks), None),
        "tables": {
            metric: _rank_table(metric, run, number) for metric in RANK_METRICS if metric in run.ranks
        },
        "places": [
            {what: [names[name] for name in getattr(each, what)] for what in ("hosts", "devices", "nics")}
            for each in kept
        ],
        "names": [*names],
        "note": " ".join(said),
        "slow": [slow._asdict() for slow in run.data.slow_ranks],
    }


def _kept(places: Sequence[RankPlaces], names: dict[str, int]) -> list[RankPlaces]:
    """Return the places of the newest starts, and number their names."""
    kept: list[RankPlaces] = []
    characters = 0
    for each in reversed(places):
        new = dict.fromkeys(name for name in (*each.hosts, *each.devices, *each.nics) if name not in names)
        characters += sum(map(len, new))
        if characters > _MAX_NAME_CHARACTERS:
            break
        names |= {name: len(names) + index for index, name in enumerate(new)}
        kept.insert(0, each)
    return kept


def _rank_table(metric: str, run: ReportedRun, number: Mapping[int, int]) -> Reply:
    table = run.ranks[metric]
    starts = [
        [column, number[places.first_row]]
        for column, places in sorted(table.places.items())
        if places.first_row in number
    ]
    return {
        "steps": table.steps,
        "records": table.num_records,
        "num_ranks": len(table.values),
        "means": _numbers(table.means),
        "starts": starts,
        "values": pybase64.b64encode(table.values.astype("<f4").tobytes()).decode(),
    }


def _text(run: Reply) -> str:
    """Return the summary of a run as text, for a reader without scripts."""
    summary = run["summary"]
    lines = [run["name"], *filter(None, (summary["ended"], summary["about"]))]
    lines += [f"{each['title']}: {each['value']}  {each['note']}".rstrip() for each in summary["figures"]]
    for table in summary["tables"]:
        lines += ["", table["title"], *("  ".join(row) for row in (table["head"], *table["rows"]))]
    return "\n".join(lines)


def _bundle(entry: str) -> str:
    """Return a script and what it imports as one script: each module is a function, called once."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = _read(name)
        for _, imported in _IMPORT.findall(text):
            if imported not in parts:
                add(imported)
        exports = ", ".join(exported for _, exported in _EXPORT.findall(text))
        body = _EXPORT.sub(r"\1", _IMPORT.sub(r'const \1 = modules["\2"];\n', text))
        parts[name] = f'modules["{name}"] = (() => {{\n{body}return {{ {exports} }};\n}})();\n'

    add(entry)
    return "const modules = {};\n" + "".join(parts.values())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _read(name: str) -> str:
    return files("penstock.obs").joinpath("page", name).read_text(encoding="utf-8")

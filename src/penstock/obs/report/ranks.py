"""Heat map of the ranks in a report: a table for each metric, bounded, as JSON for the page's script."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import pybase64

from penstock.core.units import plural, short
from penstock.obs.metric_names import RANK_METRICS
from penstock.obs.report.charts import embedded
from penstock.obs.run_data.rank_columns import RankColumns, RankPlaces, RankTable

_MOST_NAME_CHARACTERS = 1 << 20
"""Of hosts, devices and network interfaces; where ranks of older starts ran is left out beyond."""
_REPORT_CELLS = 384 << 10
"""Values in a report of the metric that is shown first: 384 columns of 1,024 ranks, 2 MB as text."""
_OTHERS_CELLS = 256 << 10
"""The same of all others together."""
_REPORT_COLUMNS = 1000
_FEWEST_COLUMNS = 16
"""A metric of which a report had fewer is left out."""
_HIGHEST = 3
"""Ranks named for a reader without scripts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRanks:
    """Metrics of the ranks in a report."""

    tables: Mapping[str, RankTable] = field(default_factory=dict)
    """By metric of RANK_METRICS, the one that is shown first at first. {}: no ranks were recorded."""
    left_out: Sequence[str] = ()
    """Metrics that would make the file too large, or take too long to read."""


def reported_ranks(
    columns_of: Callable[[str], RankColumns], first: str, *, has_others: bool = True
) -> ReportedRanks:
    """Return the metrics of a run's ranks for a report: some 4 MB as text, however long the run is.

    Args:
        columns_of: opens a metric; it may be closed by the next call.
        first: metric that is shown first, and has the most columns.
        has_others: False: it is the only one. Each reads the whole file, once.
    """
    tables: dict[str, RankTable] = {}
    left_out: list[str] = []
    others = [metric for metric in RANK_METRICS if metric != first]
    for metric in (first, *others):
        if metric != first and not has_others:
            left_out.append(metric)
            continue
        cells = _REPORT_CELLS if metric == first else _OTHERS_CELLS // len(others)
        table = columns_of(metric).table(columns=_REPORT_COLUMNS, cells=cells)
        if metric != first and len(table.steps) < min(table.num_records, _FEWEST_COLUMNS):
            left_out.append(metric)
        elif table.steps:
            tables[metric] = table
    return ReportedRanks(tables=tables, left_out=left_out)


def ranks_section(ranks: ReportedRanks) -> str:
    """Return the section of the heat map as HTML; "" if no ranks were recorded."""
    if not ranks.tables:
        return ""
    shown, table = next(iter(ranks.tables.items()))
    places = {each.first_row: each for found in ranks.tables.values() for each in found.places.values()}
    names: dict[str, int] = {}
    kept = _kept([places[row] for row in sorted(places)], names)
    number = {each.first_row: index for index, each in enumerate(kept)}
    data = {
        "shown": shown,
        "tables": {
            metric: _table(ranks.tables[metric], number) for metric in RANK_METRICS if metric in ranks.tables
        },
        "places": [
            {
                "hosts": [names[name] for name in each.hosts],
                "devices": [names[name] for name in each.devices],
                "nics": [names[name] for name in each.nics],
            }
            for each in kept
        ],
        "names": [*names],
    }
    said = ""
    if ranks.left_out:
        said = (
            f"This file is without {', '.join(ranks.left_out)}, which would make it too large: `penstock "
            "console` shows them. "
        )
    if len(kept) < len(places):
        said += f"Where ranks ran is known here of the newest {len(kept)} of {plural(len(places), 'start')}."
    return (
        f"<section><h2>Ranks</h2>{f'<p>{escape(said)}</p>' if said else ''}"
        '<div id="heat-map"><p>The heat map is drawn by the script of this page, which does not run here. '
        f"In words: {escape(_in_words(shown, table))}</p></div></section>"
        f'<script type="application/json" id="ranks-data">{embedded(data)}</script>'
    )


def _kept(places: Sequence[RankPlaces], names: dict[str, int]) -> list[RankPlaces]:
    """Return the places of the newest starts, and number their names: each stands once in the page."""
    kept: list[RankPlaces] = []
    characters = 0
    for each in reversed(places):
        new = dict.fromkeys(name for name in (*each.hosts, *each.devices, *each.nics) if name not in names)
        characters += sum(map(len, new))
        if characters > _MOST_NAME_CHARACTERS:
            break
        names |= {name: len(names) + index for index, name in enumerate(new)}
        kept.insert(0, each)
    return kept


def _table(table: RankTable, number: Mapping[int, int]) -> dict[str, Any]:  # Any: JSON
    return {
        "steps": table.steps,
        "records": table.num_records,
        "num_ranks": len(table.values),
        "means": [float(f"{mean:.6g}") if math.isfinite(mean) else None for mean in table.means.tolist()],
        "starts": [
            [column, number[places.first_row]]
            for column, places in sorted(table.places.items())
            if places.first_row in number
        ],
        "values": pybase64.b64encode(table.values.astype("<f4").tobytes()).decode(),
    }


def _in_words(metric: str, table: RankTable) -> str:
    """Return the ranks with the highest means in a sentence.

    >>> table = RankTable([5], np.ones((2, 1), np.float32), np.array([1.0, 1.5]), 5)
    >>> _in_words("own_s", table)
    '2 ranks, 5 records; highest mean of own_s (s): 1.500 of rank 1, 1.000 of rank 0.'
    """
    known = np.flatnonzero(np.isfinite(table.means))
    highest = known[np.argsort(-table.means[known], kind="stable")][:_HIGHEST].tolist()
    means = ", ".join(f"{short(float(table.means[rank]))} of rank {rank}" for rank in highest)
    size = f"{plural(len(table.values), 'rank')}, {plural(table.num_records, 'record')}"
    return f"{size}; highest mean of {metric} ({RANK_METRICS[metric][0]}): {means or 'unknown'}."

"""Heat map of the ranks in a report: a table for each metric, bounded, as JSON for the page's script."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64

from penstock.core.units import plural, short
from penstock.obs.metric_names import RANK_METRICS
from penstock.obs.report.charts import embedded

_MOST_NAME_CHARACTERS = 1 << 20
"""Of hosts, devices and network interfaces; where ranks of older starts ran is left out beyond."""
_HIGHEST = 3
"""Ranks named for a reader without scripts."""

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class RankPlaces:
    """Hosts, devices and network interfaces of the ranks from a start of the job on, by rank."""

    first_row: int
    """Records before that start."""
    hosts: list[str]
    devices: list[str]
    nics: list[str]
    """Names; "" where a rank told none."""


@dataclass(slots=True)
class RankTable:
    """Values of a metric by rank and step."""

    steps: list[int] = field(default_factory=list)
    """Last step of each column."""
    values: Float32 = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[ranks, columns]; the largest of the column's records, NaN where a rank did not exist."""
    means: Float64 = field(default_factory=lambda: np.empty(0))
    """[ranks]; means over all records, not over columns."""
    num_records: int = 0
    """Records in all columns together."""
    places: dict[int, RankPlaces] = field(default_factory=dict)
    """Column -> where the ranks ran from it on. No column has records of two starts with other places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRanks:
    """Metrics of the ranks in a report."""

    tables: Mapping[str, RankTable] = field(default_factory=dict)
    """By metric of RANK_METRICS, the one that is shown first at first. {}: no ranks were recorded."""
    left_out: Sequence[str] = ()
    """Metrics that would make the file too large, or take too long to read."""


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
            f"This file is without {', '.join(ranks.left_out)}: choose one of them in the view Ranks of the "
            "console, and take the page along from there. "
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

"""Draw where the time of a run's steps went, phase by phase, over its steps."""

from itertools import pairwise

import numpy as np

from penstock.obs.areas import Areas, draw_areas
from penstock.obs.axis import Axis, short
from penstock.obs.history import History

_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "blocked on communication",
    "data_wait": "waiting for data",
}
"""Phase -> what it is called; useful work lies lowest."""
_MOST_STRETCHES = 100


def phase_chart(history: History) -> str:
    """Return the chart as an HTML `figure` element; nothing where no phase was recorded."""
    columns = np.stack([history.columns[f"{phase}_share"] for phase in _NAMES], axis=1)
    known = np.isfinite(columns).all(axis=1)
    steps, columns = history.steps[known], columns[known]
    if not len(steps):
        return ""
    edges = np.unique(np.linspace(0, len(steps), min(len(steps), _MOST_STRETCHES) + 1).astype(np.int64))
    means = [columns[low:high].mean(axis=0).tolist() for low, high in pairwise(edges)]
    lasts = [int(steps[high - 1]) for high in edges[1:]]
    first = float(steps[0]) - 1
    whole = ", ".join(
        f"{name} {short(float(share), unit='share')}"
        for name, share in zip(_NAMES.values(), columns.mean(axis=0), strict=True)
    )
    return draw_areas(
        Areas(
            key="phases",
            title="Where a step's time goes",
            description=f"On average: {whole}; the rest is in none of them.",
            names=list(_NAMES.values()),
            axis=Axis(low=first, high=float(lasts[-1])),
            ends=[first, *map(float, lasts)],
            steps=lasts,
            shares=means,
        )
    )

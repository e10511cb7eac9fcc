"""Render several runs as one HTML page: their losses by step, tokens and time, speed, traffic, recipes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.units import mib
from penstock.obs.axis import Unit, short
from penstock.obs.figures import UNKNOWN, Config, key_figures, outcome
from penstock.obs.history import Float64, History
from penstock.obs.mixture_chart import mixture_chart
from penstock.obs.page_file import fill
from penstock.obs.series import shrink, smooth, window_for
from penstock.obs.svg import Chart, Layer, draw
from penstock.obs.table import glossary, section

MOST_RUNS = 8
"""As many as there are colours that can be told apart."""

_TIME = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True, slots=True)
class Run:
    """A run to compare."""

    name: str
    """Unique among them."""
    history: History
    config: Config
    """Its resolved recipe."""


def render_comparison(runs: Sequence[Run]) -> str:
    """Return the page; 2 to MOST_RUNS runs."""
    assert 2 <= len(runs) <= MOST_RUNS, len(runs)
    mixtures = (
        mixture_chart(run.history, key=f"mixture-{index}", title=f"Mixture of {run.name}, share of tokens")
        for index, run in enumerate(runs)
    )
    return fill(
        "compare.html",
        name=" · ".join(run.name for run in runs),
        figures=_figures(runs),
        charts="".join(draw(chart) for chart in _charts(runs)) + "".join(mixtures),
        differences=_differences(runs),
        glossary=glossary(),
    )


def _charts(runs: Sequence[Run]) -> Iterator[Chart]:
    seconds = [np.nancumsum(run.history.columns["step_s"]) for run in runs]
    longest = max(float(each[-1]) for each in seconds)
    size, unit = next(((size, unit) for size, unit in _TIME if longest >= 2 * size), _TIME[-1])
    steps = _Along("step", [run.history.steps for run in runs])
    tokens = _Along("tokens", [run.history.columns["tokens"] for run in runs])
    time = _Along(unit, [each / size for each in seconds])
    loss = "Loss, nats per token"
    yield _chart(runs, steps, "loss", title=loss)
    yield _chart(runs, tokens, "loss", key="loss-by-tokens", title=f"{loss}, by tokens")
    yield _chart(runs, time, "loss", key="loss-by-time", title=f"{loss}, by {unit}")
    yield _chart(runs, steps, "tokens_per_s", title="Tokens per second")
    for metric, title in (
        ("communication_share", "Share of the step blocked on communication"),
        ("data_wait_share", "Data-wait share"),
    ):
        if any(np.isfinite(run.history.columns[metric]).any() for run in runs):
            yield _chart(runs, steps, metric, title=title, unit="share")


@dataclass(frozen=True, slots=True)
class _Along:
    """What a chart is drawn by."""

    name: str
    places: Sequence[Float64]
    """[runs][steps]"""


def _chart(
    runs: Sequence[Run], along: _Along, metric: str, *, title: str, key: str = "", unit: Unit = "number"
) -> Chart:
    layers = []
    for color, (run, places) in enumerate(zip(runs, along.places, strict=True)):
        values = run.history.columns[metric]
        mean = smooth(values, window=window_for(len(values)))
        layers.append(Layer(name=run.name, series=shrink(places, mean), style="smooth", color=color))
    ends = ", ".join(
        f"{layer.name} ends at {short(float(layer.series.mean[-1]), unit=unit)}"
        for layer in layers
        if len(layer.series.mean)
    )
    return Chart(
        key=key or metric.replace("_", "-"),
        title=title,
        description=f"{title}, by {along.name}, of each run: {ends}.",
        layers=layers,
        last_step=max(float(places[-1]) for places in along.places),
        from_zero=metric != "loss",
        unit=unit,
        along=along.name,
    )


def _figures(runs: Sequence[Run]) -> str:
    columns = []
    for run in runs:
        figures = {figure.title: figure.value for figure in key_figures(run.history, run.config)}
        traffic = run.history.traffic
        sent = mib(sum(traffic.sent_bytes.values())) if traffic else UNKNOWN
        columns.append({"state": outcome(run.history, run.config)[1], **figures, "sent in a step": sent})
    rows = [[title, *(column[title] for column in columns)] for title in columns[0]]
    return section("Runs", ["", *(run.name for run in runs)], rows)


def _differences(runs: Sequence[Run]) -> str:
    """Return the settings in which the recipes differ, as a table; the folder of a run always does."""
    settings = [dict(_flat(run.config)) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each if name != "run.dir")
    rows = [
        [name, *(each.get(name, UNKNOWN) for each in settings)]
        for name in names
        if len({each.get(name) for each in settings}) > 1
    ]
    if not rows:
        return "<section><h2>Recipes</h2><p>The recipes are the same.</p></section>"
    return section("Where the recipes differ", ["setting", *(run.name for run in runs)], rows)


def _flat(config: Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)

"""Comparison of several runs as one HTML page: losses by step, tokens and time, speed, traffic, recipes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from penstock.core.toml import flat, plain
from penstock.core.units import mib
from penstock.obs.report.axis import Unit, short
from penstock.obs.report.history import Float64, History
from penstock.obs.report.html import fill, glossary, section
from penstock.obs.report.series import shrink, smooth, window_for
from penstock.obs.report.stacked_areas import mixture_chart
from penstock.obs.report.summary import UNKNOWN, Config, key_figures, outcome, same_peak, setting
from penstock.obs.report.svg import Chart, Layer, draw

MOST_RUNS = 8
"""Maximum number of runs: as many as there are distinguishable colours."""

_TIME = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Run to compare."""

    name: str
    """Name, unique among the runs."""
    history: History
    config: Config
    """Resolved recipe of the run."""
    tokenizer: str = ""
    """Fingerprint of its tokenizer; empty if only the vocabulary size is known."""

    @property
    def vocabulary(self) -> str:
        """Key of the vocabulary: losses per token are comparable only within one."""
        return self.tokenizer or f"{setting(self.config, 'model.vocab_size')} tokens"


def render_comparison(runs: Sequence[ComparedRun]) -> str:
    """Return the page for 2 to MOST_RUNS runs."""
    assert 2 <= len(runs) <= MOST_RUNS, len(runs)
    mixtures = (
        mixture_chart(run.history, key=f"mixture-{index}", title=f"Mixture of {run.name}, share of tokens")
        for index, run in enumerate(runs)
    )
    return fill(
        "compare.html",
        name=" · ".join(run.name for run in runs),
        figures=_figures(runs) + _not_compared(runs),
        charts="".join(draw(chart) for chart in _charts(runs)) + "".join(mixtures),
        differences=_differences(runs),
        glossary=glossary(),
    )


def _charts(runs: Sequence[ComparedRun]) -> Iterator[Chart]:
    seconds = [np.nancumsum(run.history.columns["step_s"]) for run in runs]
    longest = max(float(each[-1]) for each in seconds)
    size, unit = next(((size, unit) for size, unit in _TIME if longest >= 2 * size), _TIME[-1])
    steps = _Along("step", [run.history.steps for run in runs])
    tokens = _Along("tokens", [run.history.columns["tokens"] for run in runs])
    time = _Along(unit, [each / size for each in seconds])
    if _have_one_tokenizer(runs):
        loss = "Loss, nats per token"
        yield _chart(runs, steps, "loss", title=loss)
        yield _chart(runs, tokens, "loss", key="loss-by-tokens", title=f"{loss}, by tokens")
        yield _chart(runs, time, "loss", key="loss-by-time", title=f"{loss}, by {unit}")
    if any(np.isfinite(run.history.validation_bits).any() for run in runs):
        bits = "Held-out text, bits per byte"
        yield _bits_chart(runs, steps, title=bits, key="bits-per-byte")
        yield _bits_chart(runs, time, title=f"{bits}, by {unit}", key="bits-per-byte-by-time")
    yield _chart(runs, steps, "tokens_per_s", title="Tokens per second")
    for metric, title in (
        ("communication_share", "Share of the step blocked on communication"),
        ("data_wait_share", "Data-wait share"),
    ):
        if any(np.isfinite(run.history.columns[metric]).any() for run in runs):
            yield _chart(runs, steps, metric, title=title, unit="share")


@dataclass(frozen=True, slots=True)
class _Along:
    """Horizontal quantity of a chart: steps, tokens or time."""

    name: str
    places: Sequence[Float64]
    """[runs][steps] positions on the axis."""


def _chart(
    runs: Sequence[ComparedRun],
    along: _Along,
    metric: str,
    *,
    title: str,
    key: str = "",
    unit: Unit = "number",
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


def _bits_chart(runs: Sequence[ComparedRun], along: _Along, *, title: str, key: str) -> Chart:
    layers = []
    for color, (run, places) in enumerate(zip(runs, along.places, strict=True)):
        history = run.history
        at = np.interp(history.validation_steps, history.steps, places)
        series = shrink(at, history.validation_bits)
        layers.append(Layer(name=run.name, series=series, style="smooth", color=color))
    ends = ", ".join(
        f"{layer.name} ends at {short(float(layer.series.mean[-1]))}"
        for layer in layers
        if len(layer.series.mean)
    )
    return Chart(
        key=key,
        title=title,
        description=f"{title}, by {along.name}, of each run: {ends}.",
        layers=layers,
        last_step=max(float(places[-1]) for places in along.places),
        along=along.name,
    )


def _have_one_tokenizer(runs: Sequence[ComparedRun]) -> bool:
    return len({run.vocabulary for run in runs}) == 1


def _have_one_peak(runs: Sequence[ComparedRun]) -> bool:
    starts = [run.history.starts[-1:] for run in runs]
    return same_peak([start[0].peak_of_each if start else np.nan for start in starts])


def _not_compared(runs: Sequence[ComparedRun]) -> str:
    """Return a note on the metrics that are not compared, and the reason."""
    said = []
    if not _have_one_tokenizer(runs):
        said.append("Losses in nats per token are not compared: the runs have different tokenizers. Bits per "
                    "byte are, where the runs were validated on text.")  # fmt: skip
    if not _have_one_peak(runs):
        said.append("MFU is not compared: the peaks that it is a share of differ, or one is not known.")
    return "".join(f'<p class="summary">{escape(text)}</p>' for text in said)


def _figures(runs: Sequence[ComparedRun]) -> str:
    columns = []
    left_out = set() if _have_one_peak(runs) else {"mfu"}
    left_out |= set() if _have_one_tokenizer(runs) else {"loss", "validation_loss"}
    for run in runs:
        every = [figure for figure in key_figures(run.history, run.config) if figure.metric not in left_out]
        figures = {figure.title: figure.value for figure in every}
        traffic = run.history.traffic
        sent = mib(sum(traffic.sent_bytes.values())) if traffic else UNKNOWN
        columns.append({"state": outcome(run.history, run.config)[1], **figures, "sent in a step": sent})
    titles = dict.fromkeys(title for column in columns for title in column)
    rows = [[title, *(column.get(title, UNKNOWN) for column in columns)] for title in titles]
    return section("Runs", ["", *(run.name for run in runs)], rows)


def _differences(runs: Sequence[ComparedRun]) -> str:
    """Return the settings in which the recipes differ, as a table; run.dir always differs."""
    settings = [{name: plain(value) for name, value in flat(run.config)} for run in runs]
    names = dict.fromkeys(name for each in settings for name in each if name != "run.dir")
    rows = [
        [name, *(each.get(name, UNKNOWN) for each in settings)]
        for name in names
        if len({each.get(name) for each in settings}) > 1
    ]
    if not rows:
        return "<section><h2>Recipes</h2><p>The recipes are the same.</p></section>"
    return section("Where the recipes differ", ["setting", *(run.name for run in runs)], rows)

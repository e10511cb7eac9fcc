"""Comparison of several runs as one HTML page: losses by step, tokens and time, speed, traffic, recipes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from penstock.core.toml import flat, plain
from penstock.core.units import Unit, mib, short
from penstock.obs.report.charts import Chart, Layer, charts_section, line, thinned
from penstock.obs.report.history import History
from penstock.obs.report.html import glossary, page, section
from penstock.obs.report.run_charts import mixture_chart
from penstock.obs.report.summary import UNKNOWN, Config, key_figures, outcome, same_peak, setting
from penstock.obs.thin import Float64

MOST_RUNS = 8
"""Maximum number of runs: as many as there are distinguishable colours."""

_POINTS, _MEAN_POINTS = 1200, 500
"""Points of the lines of a chart, of all runs together, as they are and smoothed."""


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
    name = " · ".join(run.name for run in runs)
    parts = (
        f'<header><p class="eyebrow">Penstock runs</p><h1>{escape(name)}</h1></header>',
        _figures(runs) + _not_compared(runs),
        charts_section(_charts(runs), label="Charts"),
        _differences(runs),
        f"<section>{glossary()}</section>",
        "<footer>Drawn by <code>penstock report</code> from metrics.jsonl and config.json.</footer>",
    )
    return page(f"{name} · Penstock runs", parts)


def _charts(runs: Sequence[ComparedRun]) -> Iterator[Chart]:
    steps = _Along("step", [run.history.steps for run in runs])
    tokens = _Along("tokens", [run.history.columns["tokens"] for run in runs])
    time = _Along("time", [np.nancumsum(run.history.columns["step_s"]) for run in runs])
    if _have_one_tokenizer(runs):
        loss = "Loss, nats per token"
        yield _chart(runs, steps, "loss", title=loss, is_wide=True)
        yield _chart(runs, tokens, "loss", key="loss-by-tokens", title=f"{loss}, by tokens")
        yield _chart(runs, time, "loss", key="loss-by-time", title=f"{loss}, by time")
    if any(np.isfinite(run.history.validation_bits).any() for run in runs):
        bits = "Held-out text, bits per byte"
        yield _bits_chart(runs, steps, title=bits, key="bits-per-byte")
        yield _bits_chart(runs, time, title=f"{bits}, by time", key="bits-per-byte-by-time")
    yield _chart(runs, steps, "tokens_per_s", title="Tokens per second")
    for metric, title in (
        ("communication_share", "Share of the step blocked on communication"),
        ("data_wait_share", "Data-wait share"),
    ):
        if any(np.isfinite(run.history.columns[metric]).any() for run in runs):
            yield _chart(runs, steps, metric, title=title, unit="share")
    for index, run in enumerate(runs):
        title = f"Mixture of {run.name}, share of tokens"
        yield mixture_chart(run.history, key=f"mixture-{index}", title=title)


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
    is_wide: bool = False,
) -> Chart:
    layers = [
        line(
            places,
            run.history.columns[metric],
            name=run.name,
            color=color,
            stays=False,
            points=_POINTS // len(runs),
            mean_points=_MEAN_POINTS // len(runs),
        )
        for color, (run, places) in enumerate(zip(runs, along.places, strict=True))
    ]
    return Chart(
        key=key or metric.replace("_", "-"),
        title=title,
        description=_ends(title, along, layers, unit=unit),
        layers=layers,
        along=along.name,
        from_zero=metric != "loss",
        is_wide=is_wide,
        unit=unit,
    )


def _bits_chart(runs: Sequence[ComparedRun], along: _Along, *, title: str, key: str) -> Chart:
    layers = []
    for color, (run, places) in enumerate(zip(runs, along.places, strict=True)):
        history = run.history
        at = np.interp(history.validation_steps, history.steps, places)
        x, y = thinned(at, history.validation_bits, points=_POINTS // len(runs))
        layers.append(Layer(name=run.name, x=x, y=y, color=color))
    return Chart(
        key=key, title=title, description=_ends(title, along, layers), layers=layers, along=along.name
    )


def _ends(title: str, along: _Along, layers: Sequence[Layer], *, unit: Unit = "number") -> str:
    ends = ", ".join(
        f"{layer.name} ends at {short(float(layer.y[-1]), unit=unit)}" for layer in layers if len(layer.y)
    )
    return f"{title}, by {along.name}, of each run: {ends}."


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

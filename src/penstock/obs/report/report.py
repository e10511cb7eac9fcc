"""Report of a run as one self-contained HTML page.

Text from files is always escaped, and the page's content security policy allows no other script and no
fetching. Without scripts the page has the same figures and tables, and the charts in words.
"""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from penstock.core.toml import toml_text
from penstock.core.units import mib, plural, si
from penstock.obs.metric_names import METRICS
from penstock.obs.report.answers import samples_section
from penstock.obs.report.charts import charts_section
from penstock.obs.report.history import History, history_of
from penstock.obs.report.html import (
    folded,
    glossary,
    heldout_table,
    page,
    section,
    table,
    table_head,
    task_table,
    trouble,
)
from penstock.obs.report.ranks import ReportedRanks, ranks_section
from penstock.obs.report.rows import ReportedRows, rows_section
from penstock.obs.report.run_charts import run_charts
from penstock.obs.report.summary import UNKNOWN, Config, Figure, key_figures, outcome, setting, starts
from penstock.obs.run_data.columns import RunData

_STARTS = (
    "at step",
    "processes",
    "time, UTC",
    "steps taken",
    "median tokens/s",
    "peak",
    "changed in the recipe",
)
_MAX_STARTS = 200
_NO_RANKS = ReportedRanks()
_NO_ROWS = ReportedRows()


def render(
    data: RunData,
    config: Config,
    *,
    name: str,
    references: Mapping[str, float] | None = None,
    ranks: ReportedRanks = _NO_RANKS,
    rows: ReportedRows = _NO_ROWS,
) -> str:
    """Return the page.

    Args:
        data: what the run has recorded.
        config: the resolved recipe, from config.json.
        name: name of the run.
        references: name -> loss in nats per token, drawn as horizontal lines.
        ranks: metrics of the ranks, for the heat map.
        rows: of a step.

    Raises:
        PenstockError: there is no step, or a start is invalid.
    """
    history = history_of(data)
    kind, words = outcome(history, config)
    head = (
        f'<header><p class="eyebrow">Penstock run</p>'
        f'<h1>{escape(name)} <span class="outcome {kind}">{escape(words)}</span></h1>'
        f'<p class="summary">{escape(_summary(history, config))}</p></header>'
    )
    recipe = folded("Recipe", f'<pre tabindex="0">{escape(toml_text(config))}</pre>')
    damaged = (
        f" {plural(data.num_damaged, 'line')} that are no records are left out." if data.num_damaged else ""
    )
    parts = (
        head,
        f'<dl class="tiles">{"".join(_tile(figure) for figure in key_figures(history, config))}</dl>',
        samples_section(history),
        charts_section(run_charts(history, references or {}), label="Charts by step"),
        _traffic(history) + trouble(history),
        ranks_section(ranks),
        _corpora(history.corpus_tokens) + heldout_table(history) + task_table(history),
        rows_section(rows),
        _starts(history) + _kernels(history),
        f"<section>{recipe}{glossary()}</section>",
        f"<footer>Drawn by <code>penstock report</code> from the files of the run.{damaged}</footer>",
    )
    return page(f"{name} · Penstock run", parts)


def _summary(history: History, config: Config) -> str:
    parts = [
        ("started {} UTC", history.starts[0].time[:16].replace("T", " ") if history.starts else None),
        ("{}", setting(config, "model.model_type")),
        ("{} layers", setting(config, "model.num_hidden_layers")),
        ("hidden size {}", setting(config, "model.hidden_size")),
        ("vocabulary {}", setting(config, "model.vocab_size")),
        ("rows of {} tokens", setting(config, "data.sequence_length")),
        ("{} rows a step", setting(config, "data.global_batch_size")),
        ("{}", setting(config, "compute")),
    ]
    return " · ".join(form.format(_grouped(value)) for form, value in parts if value is not None)


def _grouped(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _tile(figure: Figure) -> str:
    unit, meaning = METRICS[figure.metric]
    hint = escape(f"{meaning}{f' ({unit})' if unit else ''}")
    return (
        f'<div class="tile"><dt><abbr title="{hint}">{escape(figure.title)}</abbr></dt>'
        f"<dd>{escape(figure.value)}<small>{escape(figure.note)}</small></dd></div>"
    )


def _corpora(tokens: Mapping[str, int]) -> str:
    if len(tokens) < 2:
        return ""
    total = max(sum(tokens.values()), 1)
    most_first = sorted(tokens.items(), key=lambda item: -item[1])
    rows = "".join(_corpus(name, number, number / total) for name, number in most_first)
    head = table_head(("corpus", "tokens", "share", ""))
    return f"<section><h2>Tokens by corpus</h2>{table('Tokens by corpus', head + rows)}</section>"


def _corpus(name: str, tokens: int, share: float) -> str:
    bar = f'<svg aria-hidden="true"><rect width="{share:.2%}" height="100%"/></svg>'
    return (
        f'<tr><th scope="row">{escape(name)}</th><td>{tokens:,}</td><td>{share:.1%}</td>'
        f'<td class="bar">{bar}</td></tr>'
    )


def _traffic(history: History) -> str:
    traffic = history.traffic
    if traffic is None or not traffic.sent_bytes:
        return ""
    seconds = float(np.nanmedian(history.columns["step_s"]))
    rows = [
        (
            axis,
            mib(number),
            "network" if axis in traffic.network_axes else "within a machine",
            f"{si(8 * number / seconds)}bit/s",
        )
        for axis, number in sorted(traffic.sent_bytes.items(), key=lambda item: -item[1])
    ]
    head = ("mesh axis", "sent by the first process", "over", "mean rate")
    return section(f"Traffic of a step, counted at step {traffic.step:,}", head, rows)


def _start(row: Sequence[str]) -> str:
    *short, changed = map(escape, row)
    return "".join(f"<td>{cell}</td>" for cell in short) + (
        f'<td class="long">{changed}</td>' if changed else "<td></td>"
    )


def _starts(history: History) -> str:
    rows = starts(history)
    if not rows:
        return ""
    shown = rows[-_MAX_STARTS:]
    body = "".join(f"<tr>{_start(row)}</tr>" for row in shown)
    left_out = len(rows) - len(shown)
    note = f"<p>The {left_out:,} starts before these are left out.</p>" if left_out else ""
    return f"<section><h2>Starts</h2>{note}{table('Starts', table_head(_STARTS) + body)}</section>"


def _kernels(history: History) -> str:
    """Return the table of the newest start's kernels, and by how much each was faster than the next."""
    found = history.starts[-1].kernels if history.starts else {}
    rows = [
        (
            key,
            row.kernel,
            f"{row.us[row.kernel]:,.4g} us" if row.kernel in row.us else UNKNOWN,
            UNKNOWN if row.lead is None else f"{row.lead:.2f} times",
            "; ".join(
                [f"{name} {us:,.4g} us" for name, us in row.us.items() if name != row.kernel]
                + [f"{name} out: {why}" for name, why in row.out.items()]
            ),
        )
        for key, row in found.items()
    ]
    head = ("operation", "kernel", "time", "faster than the next", "others")
    return section("Kernels of the last start", head, rows) if rows else ""

"""HTML tables and page template of the report; all text is escaped here."""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from penstock.core.units import plural, short
from penstock.obs.metric_names import METRICS
from penstock.obs.report.history import History
from penstock.obs.report.summary import UNKNOWN

_COLUMNS = (
    ("loss, nats per token", "corpus_validation_loss", "validation_loss"),
    ("perplexity", "corpus_perplexity", "validation_perplexity"),
    ("bits per byte", "corpus_bits_per_byte", "validation_bits_per_byte"),
)
"""Rows: title, metric of a corpus, metric of all."""
_SCRIPTS = {
    "chart-data": ("report.js",),
    "ranks-data": ("dom.js", "heat_map.js", "report_ranks.js"),
    "rows-data": ("dom.js", "rows.js", "report_rows.js"),
}
"""Element with data -> modules that draw it, beside charts.js. All become one, so their names must differ."""
_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)


def heldout_table(history: History) -> str:
    """Return the table of held-out scores as an HTML section; "" if none were recorded by corpus."""
    corpora = {name: scores for name, scores in history.heldout.items() if name}
    if not corpora:
        return ""
    rows = [_row(name, [scores.get(metric) for _, metric, _ in _COLUMNS]) for name, scores in corpora.items()]
    if len(corpora) > 1:
        whole: Mapping[str, float] = history.heldout[""]
        rows.append(_row("all", [whole.get(metric) for _, _, metric in _COLUMNS]))
    titles = ("corpus", *(title for title, _, _ in _COLUMNS))
    return section(f"Held-out text, after step {history.validation_steps[-1]:,.0f}", titles, rows)


def task_table(history: History) -> str:
    """Return the table of the scores of tasks as an HTML section; "" if none were recorded."""
    if not history.tasks:
        return ""
    rows = [
        [
            name,
            *(f"{short(one.value)} (step {one.step:,})" for one in (scores[0], scores[-1])),
            UNKNOWN if scores[-1].stderr is None else short(scores[-1].stderr),
            f"{len(scores):,}",
        ]
        for name, scores in history.tasks.items()
    ]
    return section("Tasks", ("task and metric", "first", "last", "its standard error", "evaluations"), rows)


def _row(name: str, values: list[float | None]) -> list[str]:
    return [name, *(UNKNOWN if value is None else short(value) for value in values)]


def page(title: str, parts: Iterable[str]) -> str:
    """Return a page that stands alone: styles and scripts are in it, and its policy allows no others.

    Args:
        title: plain text.
        parts: escaped HTML of the page's main part, in order.
    """
    main = "\n".join(filter(None, parts))
    scripts = _scripts(main)
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    text = Template(_read("page.html")).substitute(
        title=escape(title),
        hashes=hashes,
        style="".join(
            _read(name) for name in ("vendor/uPlot.min.css", "charts.css", "views.css", "report.css")
        ),
        main=main,
        scripts="\n".join(f"<script{kind}>{script}</script>" for script, kind in scripts.items()),
    )
    return text.encode(errors="backslashreplace").decode()  # a recipe may name a folder that is no UTF-8


def _scripts(main: str) -> dict[str, str]:
    """Return the scripts that draw a page's data, and the attributes of their elements."""
    names = [name for data, scripts in _SCRIPTS.items() if f'id="{data}"' in main for name in scripts]
    if not names:
        return {}
    library = f"/*\n{_read('vendor/LICENSE')}*/\n{_read('vendor/uPlot.iife.min.js')}"
    modules = "".join(_read(name) for name in dict.fromkeys(("charts.js", *names)))
    return {library: "", _IMPORT.sub("", modules): ' type="module"'}


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _read(name: str) -> str:
    return files("penstock.obs").joinpath("page", name).read_text(encoding="utf-8")


def section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a section with a table; the first cell of a row is its heading.

    >>> section("Runs", ["run", "loss"], [["<a>", "6.1"]]).partition("</thead>")[2]
    '<tr><th scope="row">&lt;a&gt;</th><td>6.1</td></tr></table></div></section>'
    """
    body = "".join(f"<tr>{_table_row(row)}</tr>" for row in rows)
    return f"<section><h2>{escape(title)}</h2>{table(title, table_head(head) + body)}</section>"


def table(name: str, rows: str) -> str:
    """Return a table that scrolls inside itself, by the keyboard too.

    Args:
        name: plain text, for readers who do not see it.
        rows: escaped HTML.
    """
    region = f'<div class="table" role="region" tabindex="0" aria-label="{escape(name)}">'
    return f"{region}<table>{rows}</table></div>"


def _table_row(cells: Sequence[str]) -> str:
    first, *others = map(escape, cells)
    return f'<th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}'


def table_head(titles: Sequence[str]) -> str:
    """Return the head of a table; a column without a title has an empty cell."""
    cells = "".join(f'<th scope="col">{escape(title)}</th>' if title else "<td></td>" for title in titles)
    return f"<thead><tr>{cells}</tr></thead>"


def glossary() -> str:
    """Return the meaning of every metric, folded."""
    entries = "".join(_entry(metric) for metric in METRICS)
    return folded("What the metrics mean", f'<dl class="glossary">{entries}</dl>')


def folded(title: str, inside: str) -> str:
    """Return escaped HTML that opens at a click on its title."""
    return f"<details><summary><h2>{escape(title)}</h2></summary>{inside}</details>"


def _entry(metric: str) -> str:
    unit, meaning = METRICS[metric]
    kind = f" <small>{escape(unit)}</small>" if unit else ""
    return f"<dt><code>{escape(metric)}</code>{kind}</dt><dd>{escape(meaning)}</dd>"


_MOST_STEPS = 50
_MOST_RANKS = 8


def trouble(history: History) -> str:
    """Return the sections on skipped steps and slow ranks; "" if there are none."""
    return _skipped(history) + _slow(history)


def _skipped(history: History) -> str:
    if not history.skipped:
        return ""
    left_out = len(history.skipped) - _MOST_STEPS
    title = f"{plural(len(history.skipped), 'step')} not taken" + (
        f", the last {_MOST_STEPS}" if left_out > 0 else ""
    )
    rows = [(f"{skipped.step:,}", skipped.why) for skipped in history.skipped[-_MOST_STEPS:]]
    return section(title, ("step", "why"), rows)


def _slow(history: History) -> str:
    slow = history.slowest
    worst = sorted(slow, key=lambda rank: -slow[rank].ratio)[:_MOST_RANKS]
    if not worst:
        return ""
    rows = [(str(rank), f"{slow[rank].times:,}", f"{slow[rank].ratio:.2f}") for rank in worst]
    return section(
        "Ranks the others waited for",
        ("rank", "comparisons", "times the median rank's time at most"),
        rows,
    )

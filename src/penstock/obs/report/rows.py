"""Rows of a step in a report: what it trained on, as JSON for the page's script, or how to get them."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from penstock.obs.report.charts import embedded

_HOW = (
    "The rows of a step (documents, learned tokens, text) are not in this file. "
    "`penstock report RUN --rows STEP` writes them into it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRows:
    """Some rows of a step in a report."""

    found: Mapping[str, Any] | None = None  # Any: JSON
    """The rows as the console's page gets them; None: none."""
    why_none: str = ""
    """Why they could not be read; "": nobody asked for them."""


def rows_section(rows: ReportedRows) -> str:
    """Return the section of the rows as HTML.

    >>> "are not in this file" in rows_section(ReportedRows())
    True
    """
    if rows.found is None:
        said = f"These rows could not be read. {rows.why_none}" if rows.why_none else _HOW
        return f"<section><h2>Rows of a step</h2><p>{_with_code(said)}</p></section>"
    return (
        '<section class="rows"><h2>Rows of a step</h2><div id="step-rows">'
        "<p>The rows are written by the script of this page, which does not run here.</p></div></section>"
        f'<script type="application/json" id="rows-data">{embedded(rows.found)}</script>'
    )


def _with_code(text: str) -> str:
    """Return text as HTML, in which what stands between backquotes is code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))

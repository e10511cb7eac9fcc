"""Tables and lists of a page, from text that is escaped here."""

from collections.abc import Sequence
from html import escape

from penstock.obs.names import METRICS


def section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a section with a table; the first cell of a row is its heading.

    >>> section("Runs", ["run", "loss"], [["<a>", "6.1"]]).partition("</thead>")[2]
    '<tr><th scope="row">&lt;a&gt;</th><td>6.1</td></tr></table></div></section>'
    """
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    return (
        f'<section><h2>{escape(title)}</h2><div class="table"><table>{table_head(head)}{body}</table></div>'
        "</section>"
    )


def _row(cells: Sequence[str]) -> str:
    first, *others = map(escape, cells)
    return f'<th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}'


def table_head(titles: Sequence[str]) -> str:
    """Return the head of a table; a column without a title has an empty cell."""
    cells = "".join(f'<th scope="col">{escape(title)}</th>' if title else "<td></td>" for title in titles)
    return f"<thead><tr>{cells}</tr></thead>"


def glossary() -> str:
    """Return what every metric means, as entries of a definition list."""
    return "".join(_entry(metric) for metric in METRICS)


def _entry(metric: str) -> str:
    unit, meaning = METRICS[metric]
    kind = f" <small>{escape(unit)}</small>" if unit else ""
    return f"<dt><code>{escape(metric)}</code>{kind}</dt><dd>{escape(meaning)}</dd>"

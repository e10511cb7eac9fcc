"""The last validation of a run as a table: loss, perplexity and bits per byte, corpus by corpus."""

from collections.abc import Mapping
from html import escape

from penstock.obs.axis import short
from penstock.obs.figures import UNKNOWN
from penstock.obs.history import History

_COLUMNS = (
    ("loss, nats per token", "corpus_validation_loss", "validation_loss"),
    ("perplexity", "corpus_perplexity", "validation_perplexity"),
    ("bits per byte", "corpus_bits_per_byte", "validation_bits_per_byte"),
)
"""Title, metric of a corpus, metric of all."""


def heldout_table(history: History) -> str:
    """Return the table as an HTML section; nothing of a run that never said its scores by corpus."""
    corpora = {name: scores for name, scores in history.heldout.items() if name}
    if not corpora:
        return ""
    titles = ("corpus", *(title for title, _, _ in _COLUMNS))
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    rows = "".join(
        _row(name, [scores.get(metric) for _, metric, _ in _COLUMNS]) for name, scores in corpora.items()
    )
    if len(corpora) > 1:
        whole: Mapping[str, float] = history.heldout[""]
        rows += _row("all", [whole.get(metric) for _, _, metric in _COLUMNS])
    step = f"{history.validation_steps[-1]:,.0f}"
    return (
        f"<section><h2>Held-out text, after step {step}</h2>"
        f'<div class="table"><table><thead><tr>{head}</tr></thead>{rows}</table></div></section>'
    )


def _row(name: str, values: list[float | None]) -> str:
    cells = "".join(f"<td>{UNKNOWN if value is None else short(value)}</td>" for value in values)
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'

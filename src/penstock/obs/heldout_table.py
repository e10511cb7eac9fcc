"""The last validation of a run as a table: loss, perplexity and bits per byte, corpus by corpus."""

from collections.abc import Mapping

from penstock.obs.axis import short
from penstock.obs.figures import UNKNOWN
from penstock.obs.history import History
from penstock.obs.table import section

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
    rows = [_row(name, [scores.get(metric) for _, metric, _ in _COLUMNS]) for name, scores in corpora.items()]
    if len(corpora) > 1:
        whole: Mapping[str, float] = history.heldout[""]
        rows.append(_row("all", [whole.get(metric) for _, _, metric in _COLUMNS]))
    titles = ("corpus", *(title for title, _, _ in _COLUMNS))
    return section(f"Held-out text, after step {history.validation_steps[-1]:,.0f}", titles, rows)


def _row(name: str, values: list[float | None]) -> list[str]:
    return [name, *(UNKNOWN if value is None else short(value) for value in values)]

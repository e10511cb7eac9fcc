"""Rows of a step as JSON: their documents, text, learned tokens, and losses where those were computed."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.console.runs.columns import RunColumns
from penstock.console.runs.opened import opened_run
from penstock.console.runs.token_texts import pieces_of, token_texts
from penstock.core.files import TOKENIZER_FILE
from penstock.text.tokenizer import Tokenizer
from penstock.train.data_setup import tokenizer_of
from penstock.train.inspect.open_run import OpenRun
from penstock.train.inspect.step_rows import ROW_FIELDS, RowDocument, StepRow, StepRows, rows_of_step

MOST_ROWS = 16
FIRST_ROWS = 4
"""Rows of a page, unless the reader asks for others."""
_MOST_TOKENS = 16_384
"""Tokens of a page of rows; one row may have more."""

Reply = dict[str, Any]  # Any: JSON values
Float32 = npt.NDArray[np.float32]


RunVersion = tuple[str, int]
"""Id of a run, and the generation of its records: after a rewind, its checkpoints have other weights."""
_RowKey = tuple[str, int, int, int, bytes]


class RowLosses(NamedTuple):
    """Losses of a row."""

    checkpoint: int
    """Step of the weights."""
    losses: Float32
    """[length]; of each label, NaN where none is learned."""


class KnownLosses:
    """Losses of rows that were computed, the newest: they stay when a row is shown again. Thread-safe.

    Args:
        most: labels of all rows together.
    """

    def __init__(self, *, most: int = 4 << 20) -> None:
        self._most = most
        self._known: OrderedDict[_RowKey, RowLosses] = OrderedDict()
        self._lock = Lock()

    def add(self, run: RunVersion, found: StepRows, losses: Iterable[RowLosses]) -> None:
        """Keep the losses of some rows of a step."""
        with self._lock:
            for key, own in zip(_keys(run, found), losses, strict=True):
                self._known.pop(key, None)
                self._known[key] = own
            while sum(len(each.losses) for each in self._known.values()) > self._most:
                self._known.popitem(last=False)

    def of(self, run: RunVersion, found: StepRows) -> list[RowLosses | None]:
        """Return the losses of some rows of a step, None where they are not known."""
        with self._lock:
            return [self._known.get(key) for key in _keys(run, found)]


def _keys(run: RunVersion, found: StepRows) -> Iterator[_RowKey]:
    """Yield what tells a row from others: a request may give a step to come other rows."""
    for index, row in enumerate(found.rows):
        digest = hashlib.blake2b(digest_size=16)
        for name in ("input_ids", "labels"):
            digest.update(np.ascontiguousarray(found.batch[name][index]).tobytes())
        yield (*run, found.step, row.row, digest.digest())


def open_rows(folder: Path, step: int, *, offset: int, limit: int) -> tuple[OpenRun, StepRows]:
    """Open a run's data and read some rows of a step.

    Raises:
        PenstockError: the run has no such step, or its data cannot be read.
    """
    opened = opened_run(folder, fields=ROW_FIELDS)
    opened.check_step(step)
    return opened, rows_of_step(opened, step, first=offset, most=min(limit, rows_at_once(opened, step)))


def rows_at_once(opened: OpenRun, step: int) -> int:
    """Return how many rows of a step are read at once, at most."""
    return max(1, _MOST_TOKENS // opened.loader.sequence_length_at(step - 1))


def rows_as_json(
    opened: OpenRun,
    found: StepRows,
    columns: RunColumns,
    *,
    offset: int,
    losses: Sequence[RowLosses | None] = (),
) -> Reply:
    """Return some rows of a step.

    Args:
        columns: of the run, which tell whether the step was taken.
        offset: of the first row.
        losses: of each row, where they are known; (): of none.
    """
    tokenizer = _tokenizer(opened)
    known = losses or [None] * len(found.rows)
    return {
        "step": found.step,
        "num_rows": found.num_rows,
        "offset": offset,
        "note": _note(columns, opened, found.step),
        "rows": [_row_of(row, tokenizer, own) for row, own in zip(found.rows, known, strict=True)],
    }


def _note(columns: RunColumns, opened: OpenRun, step: int) -> str:
    """Return what a reader has to know of a step; empty: it was trained as usual."""
    known = columns.column("step")
    taken = max(int(known[-1]) if len(known) else 0, opened.loader.step)
    if step > taken:
        return (
            f"Step {step:,} is yet to come: the run has taken {taken:,}. These are its rows if nothing is "
            "changed until then."
        )
    why = [event["text"] for event in columns.events if event["kind"] == "skip" and event["step"] == step]
    if why:
        return f"This step was skipped ({why[-1]}): its rows were read, and did not change the weights."
    return ""


def _tokenizer(opened: OpenRun) -> Tokenizer | None:
    own = opened.folder / TOKENIZER_FILE
    path = own if own.is_file() else tokenizer_of(opened.loader)
    return None if path is None else Tokenizer.load(path)


def _row_of(row: StepRow, tokenizer: Tokenizer | None, known: RowLosses | None) -> Reply:
    losses = None if known is None else known.losses
    documents = [_document_of(document, tokenizer, losses) for document in row.documents]
    spans = [document.span for document in row.documents if document.span.corpus]
    return {
        "row": row.row,
        "sample": row.sample,
        "corpus": spans[0].corpus if spans else "",
        "epoch": spans[0].epoch + 1 if spans else None,
        "loss": None if losses is None else _mean(losses),
        "checkpoint": None if known is None else known.checkpoint,
        "documents": documents,
    }


def _document_of(document: RowDocument, tokenizer: Tokenizer | None, losses: Float32 | None) -> Reply:
    span, number = document.span, document.span.tokens
    if not span.corpus:
        return {"document": None, "tokens": number, "pieces": []}
    own: list[float | None] | None = None
    if losses is not None:  # a label, and its loss, stand one place before their token
        before = losses[document.first : document.first + number - 1].tolist()
        own = [None, *(None if math.isnan(loss) else round(loss, 4) for loss in before)][:number]
    learned = document.is_learned.tolist()
    if number > 1:
        learned[0] = learned[1]  # nothing precedes it, so no loss counts it: it is shown like what follows
    return {
        "document": span.document,
        "corpus": span.corpus,
        "shard": span.shard,
        "offset": span.offset,
        "tokens": number,
        "loss": None if losses is None else _mean(losses[document.first : document.first + number - 1]),
        "pieces": pieces_of(token_texts(tokenizer, document.ids.tolist()), learned, own),
    }


def _mean(losses: Float32) -> float | None:
    known = losses[~np.isnan(losses)]
    return _finite(float(known.mean(dtype=np.float64))) if len(known) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

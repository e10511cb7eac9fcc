"""Rows of a step, document by document: tokens, and which of them are learned; no torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.arrays import Int64
from penstock.data.explain import DocumentSpan
from penstock.data.types import IGNORED_LABEL
from penstock.train.data_setup import FIELDS
from penstock.train.inspect.open_run import OpenRun

ROW_FIELDS = FIELDS
"""Fields that a run must be opened with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDocument:
    """Part of a document in a row."""

    span: DocumentSpan
    ids: Int64
    """[tokens]."""
    first: int
    """Position of its first token in the row."""
    is_learned: Any  # Any: [tokens] of bool
    """[tokens] True: the token is predicted from those before it, and the loss counts it. The first token of
    a part never is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One row of a step."""

    row: int
    """Index among the rows of the step, over all processes."""
    sample: int
    """Sample id."""
    documents: tuple[RowDocument, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Some rows of a step."""

    step: int
    """Step, counted from 1."""
    num_rows: int
    """Number of all rows of the step."""
    rows: tuple[StepRow, ...]
    batch: dict[str, Any]  # Any: arrays
    """The rows as training gets them."""


def rows_of_step(opened: OpenRun, step: int, *, first: int = 0, most: int = 1) -> StepRows:
    """Return the rows [first, first + most) of a step, in the order of `penstock data where`.

    Args:
        opened: opened with ROW_FIELDS.
        step: counted from 1; in the past or in the future.

    Raises:
        UsageError: the run has no such step.
        CorpusError: a corpus is gone or damaged.
    """
    opened.check_step(step)
    loader = opened.loader
    all_samples = loader.samples_of(step - 1)
    samples = all_samples[first : first + most]
    if not len(samples):
        return StepRows(step=step, num_rows=len(all_samples), rows=(), batch={})
    batch = loader.gather(samples)
    rows = [
        StepRow(
            row=first + index,
            sample=int(samples[index]),
            documents=tuple(_documents(spans, batch["input_ids"][index], batch["labels"][index])),
        )
        for index, spans in enumerate(loader.explain(samples))
    ]
    return StepRows(step=step, num_rows=len(all_samples), rows=tuple(rows), batch=batch)


def _documents(spans: list[DocumentSpan], ids: Int64, labels: Int64) -> list[RowDocument]:
    """Cut a row at the ends of its documents. A label names the token after its place."""
    found, at = [], 0
    for span in spans:
        past = at + span.tokens
        learned = np.zeros(span.tokens, bool)
        learned[1:] = labels[at : past - 1] != IGNORED_LABEL
        found.append(RowDocument(span=span, ids=ids[at:past], first=at, is_learned=learned))
        at = past
    return found

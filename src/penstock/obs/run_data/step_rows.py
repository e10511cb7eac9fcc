"""Rows of a step as a page shows them: documents, text, and losses where they were computed."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from penstock.obs.run_data.events import RunEvent

Reply = dict[str, Any]  # Any: JSON values
Piece = tuple[str, bool, float | None]
"""Text, whether it is learned, its loss in nats."""
RunVersion = tuple[str, int]
"""Id of a run, and the generation of its records: after a rewind, its checkpoints have other weights."""


class RowLosses(NamedTuple):
    """Losses of a row."""

    checkpoint: int
    """Step of the weights."""
    losses: list[list[float | None]]
    """[documents][tokens] in nats; None where a token is not learned, and for the first one of a document."""


class KnownLosses:
    """Losses of rows that were computed, the newest: they stay when a row is shown again. Thread-safe.

    Args:
        most: tokens of all rows together.
    """

    def __init__(self, *, most: int = 4 << 20) -> None:
        self._most = most
        self._known: OrderedDict[tuple[object, ...], RowLosses] = OrderedDict()
        self._lock = Lock()

    def add(self, run: RunVersion, found: Reply, losses: Iterable[RowLosses]) -> None:
        """Keep the losses of some rows of a step."""
        with self._lock:
            for key, own in zip(_keys(run, found), losses, strict=True):
                self._known.pop(key, None)
                self._known[key] = own
            while sum(len(part) for each in self._known.values() for part in each.losses) > self._most:
                self._known.popitem(last=False)

    def of(self, run: RunVersion, found: Reply) -> list[RowLosses | None]:
        """Return the losses of some rows of a step, None where they are not known."""
        with self._lock:
            return [self._known.get(key) for key in _keys(run, found)]


def _keys(run: RunVersion, found: Reply) -> Iterator[tuple[object, ...]]:
    for row in found["rows"]:
        yield *run, found["step"], row["row"], row["digest"]


def shown_rows(found: Reply, *, note: str = "", losses: Sequence[RowLosses | None] = ()) -> Reply:
    """Return some rows of a step as a page shows them.

    Args:
        found: the rows as `penstock data inspect` returns them.
        note: what a reader has to know of the step.
        losses: of each row, where they are known; (): of none.
    """
    known = losses or [None] * len(found["rows"])
    return {
        "step": found["step"],
        "num_rows": found["num_rows"],
        "offset": found["offset"],
        "note": note,
        "rows": [_row(row, own) for row, own in zip(found["rows"], known, strict=True)],
    }


def note_of(found: Reply, *, steps_recorded: int, events: Sequence[RunEvent]) -> str:
    """Return what a reader has to know of a step; empty: it was trained as usual."""
    step, taken = found["step"], max(steps_recorded, found["steps_taken"])
    if step > taken:
        return (
            f"Step {step:,} is yet to come: the run has taken {taken:,}. These are its rows if nothing is "
            "changed until then."
        )
    why = [event["text"] for event in events if event["kind"] == "skip" and event["step"] == step]
    if why:
        return f"This step was skipped ({why[-1]}): its rows were read, and did not change the weights."
    return ""


def pieces_of(
    texts: Sequence[str], is_learned: Sequence[bool], losses: Sequence[float | None] | None
) -> list[Piece]:
    """Return one piece a token with losses, or else one for each stretch of equally learned tokens.

    >>> pieces_of(["a", "b", "c"], [False, True, True], None)
    [('a', False, None), ('bc', True, None)]
    """
    if losses is not None:
        return [(text, learned, loss) for text, learned, loss in zip(texts, is_learned, losses, strict=True)]
    stretches = groupby(zip(texts, is_learned, strict=True), key=lambda one: one[1])
    return [("".join(text for text, _ in some), learned, None) for learned, some in stretches]


def _row(row: Mapping[str, Any], known: RowLosses | None) -> Reply:
    own = [None] * len(row["documents"]) if known is None else known.losses
    return {
        "row": row["row"],
        "sample": row["sample"],
        "corpus": row["corpus"],
        "epoch": row["epoch"],
        "loss": None if known is None else _mean([loss for part in known.losses for loss in part]),
        "checkpoint": None if known is None else known.checkpoint,
        "documents": [_document(part, some) for part, some in zip(row["documents"], own, strict=True)],
    }


def _document(document: Mapping[str, Any], losses: Sequence[float | None] | None) -> Reply:
    if document["document"] is None:
        return {"document": None, "tokens": document["tokens"], "pieces": []}
    return {
        "document": document["document"],
        "corpus": document["corpus"],
        "shard": document["shard"],
        "offset": document["offset"],
        "tokens": document["tokens"],
        "loss": None if losses is None else _mean(losses),
        "pieces": pieces_of(document["texts"], document["learned"], losses),
    }


def _mean(losses: Iterable[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return float(np.mean(known)) if known else None

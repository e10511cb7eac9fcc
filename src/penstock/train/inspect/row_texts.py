"""Rows of a step with the text of each token, as JSON values; no torch."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.files import TOKENIZER_FILE
from penstock.engine.detokenizer import TextStream
from penstock.text.tokenizer import Tokenizer
from penstock.train.data_setup import tokenizer_of
from penstock.train.inspect.open_run import OpenRun
from penstock.train.inspect.recent_run import opened_run
from penstock.train.inspect.step_rows import ROW_FIELDS, RowDocument, StepRows, rows_of_step

MAX_ROWS = 16
FIRST_ROWS = 4
"""Rows of a page, unless the reader asks for others."""
_MAX_TOKENS = 16_384
"""Tokens of a page of rows; one row may have more."""

View = dict[str, Any]  # Any: JSON values


def rows_view(folder: Path, step: int, *, offset: int, limit: int) -> View:
    """Open a run's data and return some rows of a step, with their documents and the text of each token.

    Raises:
        PenstockError: the run has no such step, or its data cannot be read.
    """
    opened = opened_run(folder, fields=ROW_FIELDS)
    opened.check_step(step)
    most = max(1, _MAX_TOKENS // opened.loader.sequence_length_at(step - 1))
    found = rows_of_step(opened, step, first=offset, most=min(limit, most))
    tokenizer, tune = _tokenizer(opened), opened.recipe.tune
    return {
        "step": step,
        "steps": opened.steps,
        "steps_taken": opened.loader.step,
        "num_rows": found.num_rows,
        "offset": offset,
        "limit": most,
        "tune_loss": tune.loss if tune is not None and tune.is_preference else None,
        "rows": [_row(found, index, tokenizer) for index in range(len(found.rows))],
    }


def token_texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; that of a character of several tokens comes with its last one.

    Special tokens have their names. Without a tokenizer, tokens are numbers.
    """
    if tokenizer is None:
        return [f"{token} " for token in ids]
    stream = TextStream(lambda some: tokenizer.decode(some, special=True))
    texts = [stream.push(token) for token in ids]
    if texts:
        texts[-1] += stream.close()
    return texts


def _tokenizer(opened: OpenRun) -> Tokenizer | None:
    own = opened.folder / TOKENIZER_FILE
    path = own if own.is_file() else tokenizer_of(opened.loader)
    return None if path is None else Tokenizer.load(path)


def _row(found: StepRows, index: int, tokenizer: Tokenizer | None) -> View:
    row, digest = found.rows[index], hashlib.blake2b(digest_size=16)
    for name in ("input_ids", "labels"):
        digest.update(np.ascontiguousarray(found.batch[name][index]).tobytes())
    spans = [document.span for document in row.documents if document.span.corpus]
    return {
        "row": row.row,
        "sample": row.sample,
        "corpus": spans[0].corpus if spans else "",
        "epoch": spans[0].epoch + 1 if spans else None,
        "digest": digest.hexdigest(),  # a request may give a step to come other rows
        "documents": [_document(document, tokenizer) for document in row.documents],
    }


def _document(document: RowDocument, tokenizer: Tokenizer | None) -> View:
    span, ids, learned = document.span, document.ids.tolist(), document.is_learned.tolist()
    if not span.corpus:
        return {"document": None, "tokens": span.tokens, "ids": []}
    if len(ids) > 1:
        learned[0] = learned[1]  # nothing precedes it, so no loss counts it: it is shown like what follows
    return {
        "document": span.document,
        "corpus": span.corpus,
        "shard": span.shard,
        "offset": span.offset,
        "tokens": span.tokens,
        "ids": ids,
        "texts": token_texts(tokenizer, ids),
        "learned": learned,
    }

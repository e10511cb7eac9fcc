"""Losses that were computed stay with their rows: of the same tokens, and of the same weights."""

from types import SimpleNamespace

import numpy as np

from penstock.console.runs.step_rows import KnownLosses, RowLosses


def rows(*tokens, step=5):
    """Return some rows of a step, by the first token of each."""
    ids = np.array([[token, 1, 2, 3] for token in tokens])
    found = [SimpleNamespace(row=index) for index in range(len(tokens))]
    return SimpleNamespace(step=step, rows=found, batch={"input_ids": ids, "labels": ids + 1})


def losses(*values):
    return [RowLosses(4, np.full(4, value, np.float32)) for value in values]


def test_losses_are_those_of_the_row_s_tokens_in_the_same_records():
    known = KnownLosses()
    known.add(("run", 0), rows(7, 8), losses(1.0, 2.0))
    first, second = known.of(("run", 0), rows(7, 8))
    assert (first.losses[0], second.losses[0], first.checkpoint) == (1.0, 2.0, 4)
    assert known.of(("run", 0), rows(7, 9))[1] is None, "a request gave the step another row"
    assert known.of(("run", 1), rows(7, 8)) == [None, None], "after a rewind the weights are others"
    assert known.of(("other", 0), rows(7, 8)) == [None, None]
    assert known.of(("run", 0), rows(7, 8, step=6)) == [None, None]


def test_the_newest_losses_are_kept():
    known = KnownLosses(most=8)
    for token in (1, 2, 3):
        known.add(("run", 0), rows(token), losses(float(token)))
    kept = [known.of(("run", 0), rows(token))[0] is not None for token in (1, 2, 3)]
    assert kept == [False, True, True]

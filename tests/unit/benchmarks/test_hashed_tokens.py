"""The ledger of the stress run proves what it says: it must notice a loss, a repeat and a changed token."""

import json

import numpy as np
import pytest
from benchmarks.hashed_tokens import Ledger, checksums, token_of

ROWS, LENGTH, STEP = 24, 16, 4
EXPECTED = [(ROWS, *checksums(corpus, ROWS * LENGTH)) for corpus in range(2)]


def rows_of(corpus, order):
    return token_of(corpus, np.arange(ROWS * LENGTH)).astype(np.int64).reshape(ROWS, LENGTH)[order]


def served(ledger, rows, *, first=0):
    for start in range(0, len(rows), STEP):
        ids = np.arange(first + start, first + start + STEP)
        half = STEP // 2  # as two ranks, the later samples first
        parts = [(ids[half:], rows[start + half : start + STEP]), (ids[:half], rows[start : start + half])]
        ledger.add(parts, first_sample=first + start)


def test_tokens_are_a_bijection_of_positions_and_corpora():
    tokens = np.concatenate([token_of(corpus, np.arange(100_000)) for corpus in range(3)])
    assert len(np.unique(tokens)) == 300_000
    assert tokens.min() > 0


def test_an_epoch_in_any_order_is_proven():
    ledger = Ledger(EXPECTED)
    served(ledger, rows_of(0, np.random.default_rng(0).permutation(ROWS)))
    assert (ledger.complete, ledger.wrong, ledger.steps_wrong, ledger.open_rows) == (1, [], 0, 0)


def test_an_epoch_goes_on_from_a_saved_ledger():
    ledger, order = Ledger(EXPECTED), np.random.default_rng(1).permutation(ROWS)
    served(ledger, rows_of(1, order[:8]))
    assert ledger.open_rows == 8
    again = Ledger(EXPECTED, json.loads(json.dumps(ledger.state())))
    served(again, rows_of(1, order[8:]), first=8)
    assert (again.complete, again.wrong) == (1, [])


@pytest.mark.parametrize("fault", ["a row twice", "a token altered", "a row of other tokens"])
def test_a_fault_is_noticed(fault):
    rows = rows_of(0, np.arange(ROWS)).copy()
    if fault == "a row twice":
        rows[3] = rows[4]
    elif fault == "a token altered":
        rows[5, 7] ^= 1
    else:
        rows[2, 1:] ^= 4
    ledger = Ledger(EXPECTED)
    served(ledger, rows)
    assert ledger.wrong == ["corpus 0 epoch 0"]


def test_a_step_with_other_samples_is_noticed():
    ledger = Ledger(EXPECTED)
    ledger.add([(np.arange(4), rows_of(0, np.arange(4)))], first_sample=4)
    assert ledger.steps_wrong == 1

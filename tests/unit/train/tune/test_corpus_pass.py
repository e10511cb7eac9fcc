"""Values of a pass that is interrupted, or that several processes make at once."""

import numpy as np
import pytest
import torch

from penstock.core.errors import UsageError
from penstock.data.corpus.manifest import ColumnEntry
from penstock.data.corpus.open import open_corpus
from penstock.data.corpus_rows import CorpusRows
from penstock.testing.corpora import write_corpus
from penstock.train.tune.corpus_pass import Partial

ENTRIES = [ColumnEntry(name="reference", dtype="float32")]
VALUE = 7.0


@pytest.fixture
def corpus(tmp_path):
    return open_corpus(write_corpus(tmp_path / "c", [[1] * 20] * 50, vocab_size=10))


@pytest.fixture
def rows(corpus):
    return CorpusRows(corpus, length=24, cuts=False, block_tokens=200)


def partial(tmp_path, corpus, **made_with):
    return Partial(tmp_path / "reference", corpus, ENTRIES, made_with, keeps=True)


def put(partial, rows, *blocks):
    for block in blocks:
        tables = rows.tables(block)
        partial.put(rows, tables, [torch.full((len(tables), 24), VALUE)], blocks=block + 1)


def labelled(tmp_path):
    """Return the values of all labels, and what else lies beside the columns."""
    values = (
        open_corpus(tmp_path / "c", columns=tmp_path / "reference").columns["reference"].values(0, 0, 1000)
    )
    beside = sorted(path.name for path in tmp_path.iterdir())
    return np.unique(values.reshape(50, 20)[:, 1:]).tolist(), beside


def test_a_killed_pass_goes_on_with_its_values_though_a_second_had_begun(tmp_path, corpus, rows):
    first, second = partial(tmp_path, corpus), partial(tmp_path, corpus)
    put(first, rows, 0, 1)
    first._lock.close()  # as the kernel does
    del first, second
    third = partial(tmp_path, corpus)
    assert third.blocks == 2
    put(third, rows, *range(2, rows.num_blocks))
    third.publish()
    assert labelled(tmp_path) == ([VALUE], ["c", "reference"])


@pytest.mark.parametrize("begun", [0, 3])
@pytest.mark.parametrize("ends_first", [True, False])
def test_two_passes_at_once_make_the_same_columns(tmp_path, corpus, rows, begun, ends_first):
    one = partial(tmp_path, corpus)
    put(one, rows, *range(begun))
    two = partial(tmp_path, corpus)
    assert two.blocks == begun
    for each in (one, two) if ends_first else (two, one):
        put(each, rows, *range(begun, rows.num_blocks))
        each.publish()
    assert labelled(tmp_path) == ([VALUE], ["c", "reference"])


def test_a_second_pass_removes_what_a_killed_one_left(tmp_path, corpus, rows):
    first, second = partial(tmp_path, corpus), partial(tmp_path, corpus)
    put(first, rows, 0)
    first._lock.close()  # as the kernel does
    put(second, rows, *range(rows.num_blocks))
    second.publish()
    assert labelled(tmp_path) == ([VALUE], ["c", "reference"])


def test_columns_of_something_else_are_not_taken_for_ones_own(tmp_path, corpus, rows):
    one, two = partial(tmp_path, corpus, k=1), partial(tmp_path, corpus, k=2)
    for each in (one, two):
        put(each, rows, *range(rows.num_blocks))
    one.publish()
    with pytest.raises(UsageError, match="reference exists"):
        two.publish()

"""Rows of all documents of a corpus, in corpus order."""

import numpy as np
import pytest

from penstock.data.corpus.open import open_corpus
from penstock.data.corpus_rows import CorpusRows
from penstock.testing.corpora import numbered_corpus

LENGTHS = [1, 5, 30, 0, 7, 8, 2, 16, 17, 3, 9] * 3


@pytest.mark.parametrize("block_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("cuts", [True, False])
def test_every_label_is_delivered_once_with_its_position(tmp_path, cuts, block_tokens):
    """In this corpus the token at position p is p + 1."""
    corpus = open_corpus(numbered_corpus(tmp_path / "c", LENGTHS, documents_per_shard=4))
    rows = CorpusRows(corpus, length=16, cuts=cuts, block_tokens=block_tokens)
    found = np.zeros(corpus.num_tokens, dtype=np.int64)
    for block in range(rows.num_blocks):
        tables = rows.tables(block)
        batch = rows.batch(tables)
        assert batch["input_ids"].shape == (len(tables), 16)
        labels = batch["labels"].reshape(-1)
        for at, position, count in rows.labelled(tables):
            assert labels[at : at + count].tolist() == list(range(position + 1, position + 1 + count))
            found[position : position + count] += 1
        assert (labels != -100).sum() == sum(count for *_, count in rows.labelled(tables))
    expected = np.ones(corpus.num_tokens, dtype=np.int64)
    for start, length in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        if length:
            expected[start] = 0  # nothing predicts the first token of a document
        if length > 16 and not cuts:
            expected[start : start + length] = 0
    assert found.tolist() == expected.tolist()
    assert rows.left_out == (0 if cuts else sum(length > 16 for length in LENGTHS))

"""Rows to arrays: from hand-made pieces to tokens, labels and document fields."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data.collate import FIELDS, BatchBuffers, collate
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.open import open_corpus
from penstock.data.types import PADDING
from penstock.testing.corpora import write_corpus

# Two shards: documents [11 12 13 14] [15 16] | [21 22 23]
DOCUMENTS = [[11, 12, 13, 14], [15, 16], [21, 22, 23]]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return open_corpus(write_corpus(tmp_path / "c", DOCUMENTS, documents_per_shard=2))


def collated(*parts: tuple[Corpus, list[Any]], length: int) -> dict[str, Any]:
    tables = [(corpus, [np.array(row, dtype=np.int64) for row in rows]) for corpus, rows in parts]
    return collate(tables, length=length, fields=FIELDS, buffers=BatchBuffers())


def test_a_row_of_two_documents(corpus: Corpus) -> None:
    batch = collated((corpus, [[(0, 0, 4, 0), (0, 4, 6, 0)]]), length=6)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 15, 16]]
    assert batch["labels"].tolist() == [[12, 13, 14, -100, 16, -100]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]


def test_a_piece_whose_document_goes_on_predicts_the_stored_successor(corpus: Corpus) -> None:
    batch = collated((corpus, [[(0, 1, 3, 1), (1, 0, 2, 1)]]), length=4)
    assert batch["input_ids"].tolist() == [[12, 13, 21, 22]]
    assert batch["labels"].tolist() == [[13, 14, 22, 23]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 4]


def test_a_document_over_two_rows_is_a_sequence_of_its_own_in_each(corpus: Corpus) -> None:
    batch = collated((corpus, [[(0, 0, 2, 1)], [(0, 2, 4, 0)]]), length=2)
    assert batch["labels"].tolist() == [[12, 13], [14, -100]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 4]
    assert batch["position_ids"].tolist() == [[0, 1], [0, 1]]
    assert batch["document_ids"].tolist() == [[0, 0], [0, 0]]


def test_padding_is_token_0_without_labels_in_a_document_of_its_own(corpus: Corpus) -> None:
    batch = collated((corpus, [[(0, 4, 6, 0), (PADDING, 0, 3, 0)]]), length=5)
    assert batch["input_ids"].tolist() == [[15, 16, 0, 0, 0]]
    assert batch["labels"].tolist() == [[16, -100, -100, -100, -100]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 5]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 1]]


def test_memory_used_before_leaves_no_trace(corpus: Corpus) -> None:
    buffers = BatchBuffers()
    rows = [np.array([(0, 0, 4, 0), (0, 4, 6, 0)]), np.array([(1, 0, 3, 0), (PADDING, 0, 3, 0)])]
    fresh = collate([(corpus, rows)], length=6, fields=FIELDS, buffers=buffers)
    expected = {name: field.copy() for name, field in fresh.items()}
    for field in fresh.values():
        field[...] = 77
    del fresh, field
    again = collate([(corpus, rows)], length=6, fields=FIELDS, buffers=buffers)
    assert all((again[name] == expected[name]).all() for name in FIELDS)


def test_only_the_requested_fields_are_made_each_of_its_type(corpus: Corpus) -> None:
    rows = [np.array([(0, 0, 4, 0), (0, 4, 6, 0)])]
    for name in FIELDS:
        made = collate([(corpus, rows)], length=6, fields=(name,), buffers=BatchBuffers())
        assert list(made) == [name]
        assert made[name].dtype == (np.int32 if name == "cu_seqlens" else np.int64)


def test_token_ids_beyond_16_and_beyond_31_bits_keep_their_value(tmp_path: Path) -> None:
    large = [2**16, 2**31 + 5, 2**32 - 1, 7]
    corpus = open_corpus(write_corpus(tmp_path, [large], vocab_size=2**32))
    batch = collated((corpus, [[(0, 0, 3, 1)]]), length=3)
    assert batch["input_ids"].tolist() == [large[:3]]
    assert batch["labels"].tolist() == [large[1:]]


def test_corpora_of_two_token_types_share_a_batch(corpus: Corpus, tmp_path: Path) -> None:
    wide = open_corpus(write_corpus(tmp_path / "wide", [[2**20, 2**20 + 1]], vocab_size=2**21))
    parts = [
        (corpus, [[(1, 0, 2, 1)]]),
        (wide, [[(0, 0, 2, 0)]]),
        (corpus, [[(0, 4, 6, 0)]]),
    ]
    batch = collated(*parts, length=2)
    assert batch["input_ids"].tolist() == [[21, 22], [2**20, 2**20 + 1], [15, 16]]
    assert batch["labels"].tolist() == [[22, 23], [2**20 + 1, -100], [16, -100]]

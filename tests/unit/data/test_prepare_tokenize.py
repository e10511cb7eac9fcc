"""Encoding in batches and pieces gives the tokens of whole documents."""

import numpy as np
import pytest

from penstock.data.prepare import tokenize
from penstock.data.prepare.documents import Record, Rejection, document_of
from penstock.data.prepare.tokenize import pieces_of, tokenised
from penstock.text.tokenizer import Tokenizer, train_tokenizer

PROSE = "The cat, which sat on 12 mats, isn't here.\n\n    def f(x):\n\treturn x  # why?\n" * 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([PROSE], vocab_size=400)


def test_pieces_of_prose_have_the_ids_of_the_whole(tokenizer: Tokenizer) -> None:
    pieces = pieces_of(PROSE, tokenizer, size=97)
    assert "".join(piece for _, piece in pieces) == PROSE
    assert max(len(piece) for _, piece in pieces) < 2 * 97


@pytest.mark.parametrize("text", ["x" * 100, " " * 100, "\n" * 100, "\r\n" * 50, "日" * 100, "a\n" * 50])
def test_text_without_good_places_to_cut_is_whole(tokenizer: Tokenizer, text: str) -> None:
    assert pieces_of(text, tokenizer, size=16) == [("", text)]


def test_records_come_out_in_order_whatever_the_batches(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"document {i} " * (i % 7) for i in range(50)]
    records = [Record(i, document_of(text), 0) for i, text in enumerate(texts)]
    for batch_bytes in (1, 30, 10**6):
        monkeypatch.setattr(tokenize, "_BATCH_BYTES", batch_bytes)
        monkeypatch.setattr(tokenize, "PIECE_CHARS", 16)
        batches = tokenised(enumerate(records), tokenizer, dtype=np.uint16, eos_id=0)
        for (number, record), tokens in (item for batch in batches for item in batch):
            if isinstance(record.content, Rejection):
                assert tokens is None
                assert texts[number] == ""
            else:
                assert tokens is not None
                assert tokens.dtype == np.uint16
                assert tokens[-1] == 0
                assert tokens[:-1].tolist() == tokenizer.encode(texts[number])


def test_a_text_that_cannot_be_cut_is_rejected_above_the_limit_and_told_of_below(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PIECE_CHARS", 16), ("WHOLE_BYTES", 300), ("_TOLD_BYTES", 150)):
        monkeypatch.setattr(tokenize, name, value)
    texts = ["日" * 60, "日" * 101, "the cat " * 100]
    records = [Record(i, document_of(text), 0) for i, text in enumerate(texts)]
    told: list[tuple[int, int]] = []
    [batch] = tokenised(
        enumerate(records),
        tokenizer,
        dtype=np.uint16,
        eos_id=None,
        on_whole=lambda place, size: told.append((place[1].index, size)),
    )
    (_, whole), ((_, rejected), none), (_, cut) = batch
    assert told == [(0, 180)]
    assert whole is not None
    assert whole.tolist() == tokenizer.encode(texts[0])
    assert none is None
    assert isinstance(rejected.content, Rejection)
    assert rejected.content.kind == "too_large"
    assert "303 B of text" in rejected.content.reason
    assert cut is not None
    assert cut.tolist() == tokenizer.encode(texts[2])

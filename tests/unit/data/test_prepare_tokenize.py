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


@pytest.mark.parametrize("size", [50, 64, 97, 1000])
def test_pieces_of_prose_have_the_ids_of_the_whole(tokenizer: Tokenizer, size: int) -> None:
    pieces = list(pieces_of(PROSE, size=size))
    assert "".join(pieces) == PROSE
    assert max(map(len, pieces)) <= size
    assert [token for ids in tokenizer.encode_batch(pieces) for token in ids] == tokenizer.encode(PROSE)


@pytest.mark.parametrize("text", ["x" * 100, " " * 100, "\n" * 100, "\r\n" * 50, "日" * 100, "a\n" * 50])
def test_text_without_good_places_to_cut_is_still_whole(text: str) -> None:
    pieces = list(pieces_of(text, size=16))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 16 for piece in pieces)


def test_records_come_out_in_order_whatever_the_batches(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"document {i} " * (i % 7) for i in range(50)]
    records = [Record(i, document_of(text), 0) for i, text in enumerate(texts)]
    for batch_bytes in (1, 30, 10**6):
        monkeypatch.setattr(tokenize, "_BATCH_BYTES", batch_bytes)
        monkeypatch.setattr(tokenize, "PIECE_CHARS", 16)
        batches = tokenised(enumerate(records), tokenizer.encode_batch, dtype=np.uint16, eos_id=0)
        for (number, record), tokens in (item for batch in batches for item in batch):
            if isinstance(record.content, Rejection):
                assert tokens is None
                assert texts[number] == ""
            else:
                assert tokens is not None
                assert tokens.dtype == np.uint16
                assert tokens[-1] == 0
                assert tokenizer.decode(tokens[:-1].tolist()) == texts[number]

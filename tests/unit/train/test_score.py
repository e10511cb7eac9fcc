"""Scores: what they say of a text, and that parts add up."""

import math

import pytest

from penstock.obs.metric_names import BY_CORPUS, METRICS
from penstock.train.score import Score, total, validation_record

WEB = Score(nats=20.0, tokens=10, text_bytes=40)
CODE = Score(nats=3.0, tokens=2, text_bytes=4)
UNKNOWN = Score(nats=3.0, tokens=2, text_bytes=0)
NOTHING = Score(nats=0.0, tokens=0, text_bytes=0)


def test_a_uniform_guess_among_256_bytes_is_8_bits_per_byte():
    score = Score(nats=100 * math.log(256), tokens=100, text_bytes=100)
    assert score.perplexity == pytest.approx(256)
    assert score.bits_per_byte == pytest.approx(8)


def test_the_loss_of_all_weighs_corpora_by_their_tokens():
    assert total({"web": WEB, "code": CODE}).loss == pytest.approx(23 / 12)
    assert total({"web": WEB, "code": CODE}).bits_per_byte == pytest.approx(23 / math.log(2) / 44)


def test_bytes_that_one_corpus_does_not_know_are_not_guessed():
    assert total({"web": WEB, "other": UNKNOWN}).bits_per_byte is None
    assert total({"other": UNKNOWN, "web": WEB}).bits_per_byte is None
    assert total({"web": WEB, "empty": NOTHING}).bits_per_byte == WEB.bits_per_byte


def test_a_hopeless_loss_has_an_infinite_perplexity():
    assert Score(nats=1e6, tokens=1, text_bytes=0).perplexity == math.inf


def test_a_record_has_named_metrics_and_leaves_out_what_is_not_known():
    record = validation_record({"web": WEB, "other": UNKNOWN, "empty": NOTHING}, step=7)
    assert record["step"] == 7
    assert set(record) <= set(METRICS)
    assert "validation_bits_per_byte" not in record
    assert record["corpus_bits_per_byte"] == {"web": WEB.bits_per_byte}
    assert record["corpus_validation_loss"] == {"web": 2.0, "other": 1.5}
    assert set(record["corpus_perplexity"]) == {"web", "other"}
    assert {name for name, value in record.items() if isinstance(value, dict)} <= set(BY_CORPUS)
    whole = validation_record({"web": WEB}, step=7)
    assert whole["validation_bits_per_byte"] == WEB.bits_per_byte
    assert "corpus_bits_per_byte" not in validation_record({"other": UNKNOWN}, step=7)

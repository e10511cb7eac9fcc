"""The table of the last validation."""

import re

from penstock.obs.report.html import heldout_table
from tests.run_records import gather

STEP = {"step": 1, "tokens": 8, "loss": 7.0}
VALIDATION = {
    "step": 1,
    "validation_loss": 6.5,
    "validation_perplexity": 665.1,
    "corpus_validation_loss": {"a<b": 6.25, "c": 6.75},
    "corpus_perplexity": {"a<b": 518.0, "c": 854.0},
    "corpus_bits_per_byte": {"a<b": 2.125},
}


def words(*records):
    return " ".join(re.sub(r"<[^>]+>", " ", heldout_table(gather(records))).split())


def test_the_last_validation_is_shown_corpus_by_corpus_and_in_all():
    said = words(
        {**STEP}, VALIDATION | {"validation_loss": 9.0}, STEP | {"step": 2}, VALIDATION | {"step": 2}
    )
    assert said.startswith("Held-out text, after step 2 corpus loss, nats per token perplexity bits per byte")
    for row in ("a&lt;b 6.250 518.0 2.125", "c 6.750 854.0 –", "all 6.500 665.1 –"):  # noqa: RUF001
        assert row in said, said


def test_one_corpus_needs_no_row_of_all():
    one = {"step": 1, "validation_loss": 6.5, "corpus_validation_loss": {"a": 6.5}}
    assert "all" not in words(STEP, one).split()


def test_a_run_that_never_said_its_scores_by_corpus_has_no_table():
    assert words(STEP) == words(STEP, {"step": 1, "validation_loss": 6.5}) == ""

"""Reading a run back: columns, and what a broken log says."""

import json
import math

import pytest

from penstock.core.errors import PenstockError
from penstock.obs.report.history import gather, read_lines

START = {"event": "start", "step": 0, "ranks": 2, "time": "2026-11-21T03:49:55+00:00"}
STEP = {"step": 1, "tokens": 8, "loss": 7.0, "corpus_tokens": {"a": 8}}


def test_records_become_columns_validations_starts_and_corpora():
    history = gather([START, STEP, {"step": 1, "validation_loss": 6.5}])
    assert history.steps.tolist() == [1]
    assert history.columns["loss"].tolist() == [7.0]
    assert (history.validation_steps.tolist(), history.validation_loss.tolist()) == ([1], [6.5])
    assert [(start.step, start.ranks) for start in history.starts] == [(0, 2)]
    assert history.corpus_tokens == {"a": 8}


def test_a_metric_that_was_not_recorded_is_not_a_number():
    assert math.isnan(gather([STEP]).columns["mfu"][0])


@pytest.mark.parametrize("loss", [None, float("nan")])
def test_a_loss_that_is_not_a_number_is_kept_as_one(loss):
    assert math.isnan(gather([STEP | {"loss": loss}]).columns["loss"][0])


def test_records_of_other_kinds_are_counted():
    assert gather([STEP, {"event": "sneeze", "step": 1}, {"step": 1}]).num_ignored == 2


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"loss": 1.0}, "no 'step'"),
        (STEP | {"step": 2, "loss": "low"}, "'low' is not a number"),
        (STEP | {"step": "x"}, "invalid literal"),
        (STEP, "step 1 comes after step 1"),
        (STEP | {"step": 2, "loss": 10**400}, "too large"),
        (STEP | {"step": float("nan")}, "NaN"),
        (STEP | {"step": 2, "corpus_tokens": {"a": "many"}}, "invalid literal"),
        (STEP | {"step": 2, "corpus_tokens": ["a"]}, "no attribute 'items'"),
        ({"event": "start", "step": 0}, "no 'ranks'"),
        ({"step": 1, "validation_loss": []}, "[] is not a number"),
    ],
)
def test_a_broken_record_is_named_by_its_number(record, problem):
    with pytest.raises(PenstockError, match=r"^Record 2 of the metrics is broken: ") as caught:
        gather([STEP, record])
    assert problem in str(caught.value)


@pytest.mark.parametrize("records", [[], [START]])
def test_a_run_without_a_step_is_an_error_that_says_so(records):
    with pytest.raises(PenstockError, match="has not recorded a step yet"):
        gather(records)


def test_a_last_line_that_is_still_being_written_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(STEP) + '\n{"step": 2, "lo')
    assert list(read_lines(path)) == [STEP]


@pytest.mark.parametrize("line", [b"{", b"[1]", b"", b"\xff\xfe", b"[" * 100_000])
def test_any_other_line_that_is_no_object_is_an_error_with_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(STEP).encode() + b"\n" + line + b"\n{}\n")
    with pytest.raises(PenstockError, match=r"Line 2 of .*metrics\.jsonl is not a JSON object"):
        list(read_lines(path))

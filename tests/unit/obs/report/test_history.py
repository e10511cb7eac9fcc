"""A run in the shapes of a report, and what is said of one that cannot be drawn."""

import math

import pytest

from penstock.core.errors import PenstockError
from tests.run_records import gather

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


@pytest.mark.parametrize("loss", [None, float("nan"), "low"])
def test_a_loss_that_is_not_a_number_is_kept_as_one(loss):
    assert math.isnan(gather([STEP | {"loss": loss}]).columns["loss"][0])


def test_steps_that_were_taken_again_are_those_of_the_newest_start():
    again = [STEP | {"step": n, "loss": 5.0} for n in (2, 3)]
    history = gather(
        [START, *(STEP | {"step": n} for n in (1, 2, 3)), START | {"step": 1, "ranks": 1}, *again]
    )
    assert history.columns["loss"].tolist() == [7.0, 5.0, 5.0]
    assert [start.ranks for start in history.starts] == [2, 1]


def test_scores_of_tasks_are_by_task_with_their_errors():
    scored = {"event": "evaluation", "step": 1, "task_scores": {"a/acc": 0.5, "b/acc": 0.25}}
    later = {"event": "evaluation", "step": 2, "task_scores": {"a/acc": 0.75}, "task_stderrs": {"a/acc": 0.1}}
    found = gather([STEP, scored, STEP | {"step": 2}, later]).tasks
    assert [(one.step, one.value, one.stderr) for one in found["a/acc"]] == [(1, 0.5, None), (2, 0.75, 0.1)]
    assert [one.step for one in found["b/acc"]] == [1]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"ranks": None}, "NoneType"),
        ({"ranks": 0}, "a start of 0 ranks"),
        ({"changes": {"a": 1}}, "cannot unpack"),
    ],
)
def test_a_start_that_no_run_writes_is_named_by_its_step(wrong, problem):
    with pytest.raises(PenstockError, match="The start after step 0 is broken: ") as caught:
        gather([START | wrong, STEP])
    assert problem in str(caught.value)


def test_a_start_without_ranks_says_what_it_lacks():
    with pytest.raises(PenstockError, match="no 'ranks'"):
        gather([{"event": "start", "step": 0}, STEP])


@pytest.mark.parametrize("records", [[], [START]])
def test_a_run_without_a_step_is_an_error_that_says_so(records):
    with pytest.raises(PenstockError, match="has not recorded a step yet"):
        gather(records)

"""Which steps are not taken, and when a run goes back."""

import math

import pytest

from penstock.core.errors import ConfigError
from penstock.train.guard import Rewind, StepGuard
from penstock.train.recipe.config import GuardConfig


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (2.0, math.inf), (-math.inf, math.nan)])
def test_what_is_not_finite_is_not_taken(loss, norm):
    guard = StepGuard(GuardConfig())
    assert guard.judge(2.0, 1.0, step=1) == ""
    assert (
        guard.judge(loss, norm, step=2) == f"The loss of step 2 is {loss:.6g}, its gradient norm {norm:.6g}"
    )
    assert guard.judge(2.0, 1.0, step=3) == ""


def test_jumps_are_taken_unless_the_recipe_says_otherwise():
    watchful, patient = StepGuard(GuardConfig(loss_spike=2.0, gradient_spike=10.0)), StepGuard(GuardConfig())
    for step in range(1, 30):
        assert watchful.judge(2.0, 1.0, step=step) == patient.judge(2.0, 1.0, step=step) == ""
    assert patient.judge(50.0, 500.0, step=30) == ""
    assert "is 4.1, its gradient norm 1 (the usual loss is 2)" in watchful.judge(4.1, 1.0, step=30)
    assert "gradient norm 10.5 (the usual gradient norm is 1)" in watchful.judge(3.9, 10.5, step=31)
    assert watchful.judge(3.9, 9.5, step=32) == ""


def test_a_run_that_begins_has_no_usual_yet():
    guard = StepGuard(GuardConfig(loss_spike=1.5))
    assert [guard.judge(loss, 1.0, step=step) for step, loss in enumerate((1.0, 9.0, 99.0), start=1)] == [
        ""
    ] * 3


def test_what_was_skipped_does_not_become_the_usual():
    guard = StepGuard(GuardConfig(loss_spike=2.0, max_skips=100))
    for step in range(1, 30):
        guard.judge(1.0, 1.0, step=step)
    assert all(guard.judge(9.0, 1.0, step=step) for step in range(30, 100))


def test_one_skip_too_many_among_a_hundred_steps_goes_back():
    guard = StepGuard(GuardConfig(max_skips=2))
    guard.judge(math.nan, 1.0, step=1)  # long ago
    guard.judge(math.nan, 1.0, step=150)
    guard.judge(math.nan, 1.0, step=200)
    with pytest.raises(
        Rewind, match=r"The loss of step 240 is nan.*the weights were not changed\. Lower"
    ) as asked:
        guard.judge(math.nan, 1.0, step=240)
    assert (asked.value.first, asked.value.step) == (150, 240)


@pytest.mark.parametrize("settings", [{"loss_spike": 0.5}, {"gradient_spike": -1.0}, {"max_skips": -1}])
def test_what_makes_no_sense_is_refused(settings):
    with pytest.raises(ConfigError, match=r"guard\."):
        GuardConfig(**settings)

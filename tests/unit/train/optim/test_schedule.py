"""Learning rates against their closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments
from transformers.optimization import get_scheduler

from penstock.core.errors import ConfigError
from penstock.train.optim.learning_rate import learning_rate, shortened
from penstock.train.recipe.config import ScheduleConfig
from tests.examples import examples

PEAK, STEPS = 0.5, 100
RULES = ["cosine", "linear", "wsd", "constant"]


def rates(**schedule: object) -> list[float]:
    config = ScheduleConfig(**schedule)  # type: ignore[arg-type]
    return [learning_rate(step, peak=PEAK, steps=STEPS, schedule=config) for step in range(STEPS)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("warmup", [1, 7, 99])
def test_a_warm_up_rises_in_equal_steps_to_the_peak(rule: str, warmup: int) -> None:
    found = rates(rule=rule, warmup_steps=warmup)[:warmup]
    assert found == pytest.approx([PEAK * (step + 1) / warmup for step in range(warmup)])
    assert found[-1] == PEAK


@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_a_cosine_falls_from_the_peak_towards_the_final_share(warmup: int, share: float) -> None:
    found = rates(rule="cosine", warmup_steps=warmup, final_share=share)[warmup:]
    length = STEPS - warmup
    half = (1 + share) / 2
    closed = [PEAK * (half + (1 - share) / 2 * math.cos(math.pi * i / length)) for i in range(length)]
    assert found == pytest.approx(closed)
    assert found[0] == pytest.approx(PEAK)
    assert found[length // 2] == pytest.approx(PEAK * half)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_wsd_warms_up_stays_and_decays_in_equal_steps(share: float) -> None:
    found = rates(rule="wsd", warmup_steps=10, decay_steps=20, final_share=share)
    assert found[9:81] == [PEAK] * 72
    drop = PEAK * (1 - share) / 20
    assert found[80:] == pytest.approx([PEAK - drop * i for i in range(20)])


def test_wsd_without_a_decay_stays() -> None:
    assert rates(rule="wsd") == [PEAK] * STEPS


def test_a_constant_rate_is_constant_and_knows_no_decay() -> None:
    assert rates(rule="constant", decay_steps=20) == [PEAK] * STEPS


def test_one_step_in_all_is_taken_at_the_peak() -> None:
    for rule in RULES:
        schedule = ScheduleConfig(rule=rule)  # type: ignore[arg-type]
        assert learning_rate(0, peak=PEAK, steps=1, schedule=schedule) == PEAK


@given(
    steps=st.integers(1, 300),
    rule=st.sampled_from(RULES),
    warmup=st.integers(0, 3000),
    decay=st.integers(0, 12_000),
)
@examples(100)
def test_a_schedule_of_any_length_fits_any_run(steps: int, rule: str, warmup: int, decay: int) -> None:
    schedule = ScheduleConfig(rule=rule, warmup_steps=warmup, decay_steps=decay)  # type: ignore[arg-type]
    fitted = schedule.fitted(steps)
    ramps = [warmup, decay if rule == "wsd" else 0]
    if sum(ramps) <= steps:
        assert fitted is schedule
    else:
        assert fitted.warmup_steps + (fitted.decay_steps if rule == "wsd" else 0) == steps // 2
        assert abs(fitted.warmup_steps - steps // 2 * warmup / sum(ramps)) <= 1, "their ratio is kept"
    found = [learning_rate(step, peak=PEAK, steps=steps, schedule=schedule) for step in range(steps)]
    assert all(0 < rate <= PEAK for rate in found)
    assert max(found) == PEAK


@pytest.mark.parametrize(
    ("rule", "ratio"), [("linear", 0.1), ("linear", 0.0), ("cosine", 0.03), ("linear", 1.0)]
)
def test_after_the_warm_up_rates_are_those_of_transformers(rule: str, ratio: float) -> None:
    """Its warm-up begins at 0 and ours a step later, so that the first step learns."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    warmup = (
        TrainingArguments(warmup_steps=ratio).get_warmup_steps(STEPS) if 0 < ratio < 1 else int(ratio * STEPS)
    )
    theirs = get_scheduler(rule, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS)
    expected = []
    for _ in range(STEPS):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    found = rates(rule=rule, warmup_ratio=ratio, final_share=0.0)
    assert found[warmup:] == pytest.approx(expected[warmup:])
    assert found[: max(0, warmup - 1)] == pytest.approx(expected[1:warmup])


@given(steps=st.integers(1, 3000), hundredths=st.integers(0, 100))
@examples(100)
def test_a_warm_up_by_ratio_is_rounded_up_to_steps(steps: int, hundredths: int) -> None:
    in_steps = ScheduleConfig(warmup_ratio=hundredths / 100).in_steps(steps)
    assert in_steps == ScheduleConfig(warmup_steps=-(-steps * hundredths // 100))


def test_a_ratio_out_of_range_or_beside_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"warmup_ratio must be between 0 and 1 \(got 3\.0\)"):
        ScheduleConfig(warmup_ratio=3.0)
    with pytest.raises(ConfigError, match=r"are both given.*Leave one of them out"):
        ScheduleConfig(warmup_ratio=0.1, warmup_steps=5)


def test_a_shortened_schedule_is_told() -> None:
    assert shortened(ScheduleConfig(warmup_ratio=0.5), steps=3) == ""
    wsd = ScheduleConfig(rule="wsd", warmup_steps=50, decay_steps=200)
    assert shortened(wsd, steps=250) == ""
    assert shortened(wsd, steps=12) == "Warm-up and decay take 1 and 5 of the 12 steps instead of 50 and 200"

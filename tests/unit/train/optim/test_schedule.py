"""Learning rates against their closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.optim.learning_rate import learning_rate, shortened
from penstock.train.recipe.config import ScheduleConfig
from tests.examples import examples

PEAK, STEPS = 0.5, 100


def rates(**schedule: object) -> list[float]:
    config = ScheduleConfig(**schedule)  # type: ignore[arg-type]
    return [learning_rate(step, peak=PEAK, steps=STEPS, schedule=config) for step in range(STEPS)]


@pytest.mark.parametrize("rule", ["cosine", "wsd", "constant"])
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
    for rule in ("cosine", "wsd", "constant"):
        schedule = ScheduleConfig(rule=rule)  # type: ignore[arg-type]
        assert learning_rate(0, peak=PEAK, steps=1, schedule=schedule) == PEAK


@given(
    steps=st.integers(1, 300),
    rule=st.sampled_from(["cosine", "wsd", "constant"]),
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


def test_a_shortened_schedule_is_told() -> None:
    wsd = ScheduleConfig(rule="wsd", warmup_steps=50, decay_steps=200)
    assert shortened(wsd, steps=250) == ""
    assert shortened(wsd, steps=12) == "Warm-up and decay take 1 and 5 of the 12 steps instead of 50 and 200"

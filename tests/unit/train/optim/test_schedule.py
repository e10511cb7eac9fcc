"""Learning rates against their closed forms."""

import math

import pytest

from penstock.train.optim.learning_rate import learning_rate
from penstock.train.recipe.config import ScheduleConfig

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

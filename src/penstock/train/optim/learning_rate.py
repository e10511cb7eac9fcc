"""Learning rate schedules: cosine, linear, warmup-stable-decay, constant; fitted to short runs."""

import math

from penstock.train.recipe.config import ScheduleConfig


def learning_rate(step: int, *, peak: float, steps: int, schedule: ScheduleConfig) -> float:
    """Return the learning rate of a step in [0, steps); the first step of a warm-up is not 0.

    The schedule is fitted to runs that are shorter than its warm-up and decay.

    >>> rule = ScheduleConfig(warmup_steps=2, final_share=0.0)
    >>> [round(learning_rate(s, peak=1.0, steps=6, schedule=rule), 3) for s in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    schedule = schedule.fitted(steps)
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    floor = peak * schedule.final_share
    done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    if schedule.rule == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule.rule == "linear":
        return floor + (peak - floor) * (1 - done)
    if schedule.rule == "wsd" and step >= steps - schedule.decay_steps:
        left = (steps - step) / schedule.decay_steps
        return floor + (peak - floor) * left
    return peak


def shortened(schedule: ScheduleConfig, *, steps: int) -> str:
    """Return in words how a schedule is fitted to a short run; "" if it fits as it is.

    >>> shortened(ScheduleConfig(warmup_steps=50), steps=12)
    'Warm-up takes 6 of the 12 steps instead of 50'
    """
    schedule, fitted = schedule.in_steps(steps), schedule.fitted(steps)
    if fitted == schedule:
        return ""
    if schedule.rule != "wsd" or not schedule.decay_steps:
        return (
            f"Warm-up takes {fitted.warmup_steps:,} of the {steps:,} steps instead of "
            f"{schedule.warmup_steps:,}"
        )
    return (
        f"Warm-up and decay take {fitted.warmup_steps:,} and {fitted.decay_steps:,} of the {steps:,} steps "
        f"instead of {schedule.warmup_steps:,} and {schedule.decay_steps:,}"
    )

"""The `[measure]` section of a recipe: what a run writes about itself beyond metrics.jsonl; no torch."""

import re
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.train.data_config import at_least

_MOST_STEPS = 100  # a step of a large model is tens of megabytes of trace


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """Where metrics go besides metrics.jsonl, and which steps are looked at closely."""

    tensorboard: bool = False
    """Write event files into the run's folder `tensorboard`, for `tensorboard --logdir RUN`."""
    wandb_project: str = ""
    """Send metrics to this project of Weights & Biases, under the name of the run's folder; "": to none."""
    trace_steps: str = ""
    """Steps to trace, counted from 1, past the last: "20:23" traces steps 20, 21 and 22. Each rank writes a
    file into the run's folder `traces` that https://ui.perfetto.dev opens. Traced steps are slower."""
    memory_steps: str = ""
    """Steps whose memory is recorded, allocation by allocation, likewise. On a GPU the file is a snapshot for
    https://pytorch.org/memory_viz, on a CPU a trace with allocations, the bytes in use and their shapes."""

    def __post_init__(self) -> None:
        for name in ("trace_steps", "memory_steps"):
            steps_of(getattr(self, name), name=f"measure.{name}")


def steps_of(text: str, *, name: str) -> range:
    """Return the steps that a setting names, counted from 1; none for "".

    Raises:
        ConfigError: it names none, or more than a trace can hold.

    >>> steps_of("20:23", name="measure.trace_steps"), len(steps_of("", name="measure.trace_steps"))
    (range(20, 23), 0)
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text)
    if match is None:
        raise ConfigError(f"{name} must be FIRST:PAST", got=text, fix='Example: "20:23" for steps 20 to 22.')
    first, past = int(match[1]), int(match[2])
    at_least(f"The first step of {name}", first, 1)
    if not first < past <= first + _MOST_STEPS:
        raise ConfigError(f"{name} must name 1 to {_MOST_STEPS} steps", got=text, fix='Example: "20:23".')
    return range(first, past)

"""History of a run as a report draws it: what was recorded, in the shapes of its charts and tables."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core import config
from penstock.core.errors import PenstockError
from penstock.core.toml import plain
from penstock.devices.kernel_table import ChosenKernel
from penstock.obs.metric_names import BY_CORPUS, BY_TASK, METRICS
from penstock.obs.run_data.columns import RunData
from penstock.obs.sinks import Record
from penstock.obs.thin import Float64

STEP_METRICS = tuple(
    name
    for name in METRICS
    if name not in (*BY_CORPUS, *BY_TASK, "step", "evaluation_s") and not name.startswith("validation_")
)
"""Metrics of a step's record that are single numbers."""

REWARDS = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")
"""Metrics of preferences that are charted, of training and of held-out answers."""

_MIXTURE_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start of the run's processes, the first or a later one."""

    step: int
    """Number of steps before this start."""
    ranks: int
    """Number of processes from here on."""
    time: str
    """Time of the start: ISO 8601, UTC."""
    changes: tuple[tuple[str, str, str], ...] = ()
    """Settings of the recipe that differ from the start before: path, value before, value now."""
    device: str = ""
    """Name of a rank's device, or "cpu"; empty in old logs that do not record it."""
    threads: int = 1
    """Threads that a rank computes with."""
    peak_flops: float = math.nan
    """Peak FLOP/s of all ranks; NaN if it could not be measured without other load."""
    kernels: dict[str, ChosenKernel] = field(default_factory=dict)
    """Operation and its shape -> its kernel, with the times of those that were measured."""

    @property
    def peak_of_each(self) -> float:
        """Peak of one GPU, or of one CPU thread: identifies the hardware, independent of its number."""
        return self.peak_flops / self.ranks / (self.threads if self.device == "cpu" else 1)


@dataclass(frozen=True, slots=True)
class MixturePoint:
    """Token counts after a step."""

    step: int
    tokens: int
    by_corpus: dict[str, int]


@dataclass(frozen=True, slots=True)
class MixtureChange:
    """Change of the mixture or the sequence length."""

    step: int
    """First step with the change."""
    tokens: int
    """Tokens trained on before it."""
    reason: str
    """Reason of the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that the first rank sends in a step."""

    step: int
    """Step that was counted."""
    sent_bytes: dict[str, int]
    """Bytes sent by mesh axis."""
    network_axes: tuple[str, ...]
    """Axes whose ranks are on several machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswer:
    """Answer to a prompt of [samples]."""

    prompt: str
    answer: str
    reference: str | None
    """Text that follows in the held-out document; None: unknown."""
    is_cut: bool
    """True if it reached the limit of tokens."""


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Answers to all prompts after a step."""

    step: int
    answers: tuple[SampleAnswer, ...]


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """End of a run whose held-out loss no longer fell."""

    step: int
    best_step: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Step whose update was skipped."""

    step: int
    why: str


@dataclass(slots=True)
class Slowest:
    """Rank that was the slowest in some comparisons."""

    times: int = 0
    """Number of comparisons in which it was slow."""
    ratio: float = 0.0
    """Largest ratio of its own time to the median rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One score of a task at one step."""

    step: int
    value: float
    stderr: float | None
    """Standard error; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Records of a run as columns; steps increase, and there is at least one."""

    steps: Float64
    """[steps] number of each step."""
    columns: dict[str, Float64]
    """Metric -> [steps]; NaN where a record has no value."""
    validation_steps: Float64
    """[validations] step of each validation."""
    validation_loss: Float64
    """[validations] nats per token."""
    validation_bits: Float64
    """[validations] bits per byte; NaN if the bytes of text are unknown."""
    validation_rewards: dict[str, Float64]
    """Metric of training -> [validations] its value on held-out answers; NaN where there is none."""
    heldout: dict[str, dict[str, float]]
    """Scores of the last validation: corpus -> metric -> value; "" -> all corpora together."""
    tasks: dict[str, tuple[TaskScore, ...]]
    """Scores of each task and metric, in order."""
    starts: tuple[Start, ...]
    """Starts in order."""
    corpus_tokens: dict[str, int]
    """Tokens by corpus after the last step."""
    mixture: tuple[MixturePoint, ...]
    """Tokens by corpus after some steps, the last one included: as many as a chart needs."""
    mixture_changes: tuple[MixtureChange, ...]
    """Changes in order."""
    traffic: Traffic | None
    """Last traffic count; None if there is none."""
    skipped: tuple[Skipped, ...]
    """Skipped steps in order."""
    slowest: dict[int, Slowest]
    """Slow ranks by rank."""
    samples: tuple[SampleSet, ...] = ()
    """Answers to the prompts of [samples], in order; of very many, some, the first and last among them."""
    early_end: EarlyEnd | None = None
    """Early stop; None: there was none, or the run went on since."""


def history_of(data: RunData) -> History:
    """Return the history of what a run has recorded.

    Raises:
        PenstockError: there is no step, or a start has values that no run writes.
    """
    steps, scored = data.column("step"), data.column("step", table="validations")
    if not len(steps):
        raise PenstockError("The run has not recorded a step yet", fix="Try again after its first step.")
    corpora = [name for name in data.tables["steps"] if name.startswith("corpus_tokens/")]
    return History(
        steps=steps,
        columns={name: data.column(name) for name in STEP_METRICS},
        validation_steps=scored,
        validation_loss=data.column("validation_loss", table="validations"),
        validation_bits=data.column("validation_bits_per_byte", table="validations"),
        validation_rewards={name: data.column(f"validation_{name}", table="validations") for name in REWARDS},
        heldout=_heldout(data.tables["validations"]),
        tasks=_tasks(data),
        starts=tuple(map(_start, data.starts)),
        corpus_tokens=_tokens(data, corpora, len(steps) - 1),
        mixture=_mixture(data, corpora),
        mixture_changes=_changes(data),
        traffic=_traffic(data.newest.get("traffic")),
        skipped=tuple(
            Skipped(event["step"], event["text"]) for event in data.events if event["kind"] == "skip"
        ),
        slowest=_slowest(data),
        samples=tuple(map(_samples, data.answers())),
        early_end=_early_end(data.newest.get("early_stop"), last=steps[-1]),
    )


def _changes(data: RunData) -> tuple[MixtureChange, ...]:
    changes = [event for event in data.events if event["kind"] == "mixture"]
    before = np.interp([event["step"] - 1 for event in changes], data.column("step"), data.column("tokens"))
    return tuple(
        MixtureChange(event["step"], int(np.nan_to_num(tokens)), event["text"])
        for event, tokens in zip(changes, before.tolist(), strict=True)
    )


def _early_end(record: Record | None, *, last: float) -> EarlyEnd | None:
    best = None if record is None or record["step"] != last else record.get("best_step")
    return EarlyEnd(int(last), best) if isinstance(best, int) else None


def _samples(record: Record) -> SampleSet:
    found = record.get("answers")
    return SampleSet(
        record["step"],
        tuple(
            SampleAnswer(
                prompt=str(answer.get("prompt", "")),
                answer=str(answer.get("answer", "")),
                reference=None if answer.get("reference") is None else str(answer["reference"]),
                is_cut=answer.get("finish") == "length",
            )
            for answer in (found if isinstance(found, list) else ())
            if isinstance(answer, dict)
        ),
    )


def _slowest(data: RunData) -> dict[int, Slowest]:
    found: dict[int, Slowest] = {}
    for each in data.slow_ranks:
        rank = found.setdefault(each.rank, Slowest())
        rank.times, rank.ratio = rank.times + 1, max(rank.ratio, each.own_s / each.median_s)
    return found


def _traffic(record: Record | None) -> Traffic | None:
    sent = record.get("sent_bytes") if record else None
    if record is None or not isinstance(sent, Mapping):
        return None
    whole = {str(axis): number for axis, number in sent.items() if isinstance(number, int)}
    return Traffic(
        step=record["step"], sent_bytes=whole, network_axes=tuple(map(str, record.get("network_axes") or ()))
    )


def _tokens(data: RunData, corpora: list[str], row: int) -> dict[str, int]:
    found = {name.partition("/")[2]: float(data.column(name)[row]) for name in corpora}
    return {name: int(number) for name, number in found.items() if math.isfinite(number)}


def _mixture(data: RunData, corpora: list[str]) -> tuple[MixturePoint, ...]:
    number = data.num_rows()
    rows = np.unique(np.linspace(-1, number - 1, min(number, _MIXTURE_POINTS) + 1).astype(int)[1:])
    steps, found = data.column("step"), []
    for row in rows.tolist() if len(corpora) > 1 else ():
        tokens = _tokens(data, corpora, row)
        found.append(MixturePoint(int(steps[row]), sum(tokens.values()), tokens))
    return tuple(found)


def _tasks(data: RunData) -> dict[str, tuple[TaskScore, ...]]:
    found, steps = {}, data.column("step", table="tasks").astype(int).tolist()
    for name in data.tables["tasks"]:
        kind, _, task = name.partition("/")
        if kind == "task_scores" and task:
            values = data.column(name, table="tasks").tolist()
            errors = data.column(f"task_stderrs/{task}", table="tasks").tolist()
            found[task] = tuple(
                TaskScore(step=step, value=value, stderr=error if math.isfinite(error) else None)
                for step, value, error in zip(steps, values, errors, strict=True)
                if math.isfinite(value)
            )
    return found


def _heldout(columns: Mapping[str, Float64]) -> dict[str, dict[str, float]]:
    """Return the scores of the last validation by corpus."""
    found: dict[str, dict[str, float]] = {"": {}}
    for name, values in columns.items():
        metric, _, corpus = name.partition("/")
        if name != "step" and math.isfinite(values[-1]):
            found.setdefault(corpus, {})[metric] = float(values[-1])
    return found


def _start(record: Record) -> Start:
    try:
        changes = record.get("changes", {}).items()
        ranks, threads = int(record["ranks"]), int(record.get("threads", 1))
        if ranks < 1 or threads < 1:
            raise ValueError(f"a start of {ranks} ranks with {threads} threads")
        return Start(
            step=record["step"],
            ranks=ranks,
            time=str(record["time"]),
            device=str(record.get("device", "")),
            threads=threads,
            peak_flops=_number(record.get("peak_flops")),
            changes=tuple((str(name), plain(before), plain(now)) for name, (before, now) in changes),
            kernels={key: config.build(ChosenKernel, row) for key, row in record.get("kernels", {}).items()},
        )
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PenstockError(
            f"The start after step {record['step']} is broken: {problem}", fix="Correct its line."
        ) from None


def _number(value: Any) -> float:  # Any: JSON
    return float(value) if isinstance(value, int | float) else math.nan

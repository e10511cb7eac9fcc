"""History of a run: its records as columns, one number per step, validated.

Columns are packed doubles: a million steps take 80 MB, where their records would take gigabytes.
"""

import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.core.errors import PenstockError
from penstock.core.toml import plain
from penstock.obs.metric_names import BY_CORPUS, BY_TASK, METRICS, METRICS_FILE
from penstock.obs.sinks import Record

Float64 = npt.NDArray[np.float64]

STEP_METRICS = tuple(
    name
    for name in METRICS
    if name not in (*BY_CORPUS, *BY_TASK, "step", "evaluation_s") and not name.startswith("validation_")
)
"""Metrics of a step's record that are single numbers."""

REWARDS = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")
"""Metrics of preferences that are charted, of training and of held-out answers."""

_MIXTURE_POINTS = 200
_SAMPLE_SETS = 64
_FIX = "Restore the file, or cut it before that line."


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


SLOW_RATIO = 1.2
"""Ratio to the median rank's time from which a slow rank is reported: some rank is always the slowest."""


@dataclass(slots=True)
class Slowest:
    """Rank that was the slowest in some comparisons."""

    times: int = 0
    """Number of comparisons."""
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
    num_ignored: int
    """Number of records of unknown kinds."""


def read_lines(path: Path) -> Iterator[Record]:
    """Yield the records of a file one by one, ignoring a last line without newline (still being written).

    Raises:
        PenstockError: another line is not a JSON object.
    """
    with path.open("rb") as file:
        yield from records_in(file, name=str(path))


def records_in(file: BinaryIO, *, name: str = METRICS_FILE) -> Iterator[Record]:
    """Yield the records of an open file, as `read_lines` does."""
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise PenstockError(f"Line {number} of {name} is not a JSON object", fix=_FIX)
        yield record


def gather(records: Iterable[Record]) -> History:
    """Return the history of a run's records.

    Raises:
        PenstockError: a value has the wrong type, steps decrease, or there is no step at all.


    >>> gather([{"step": 1, "loss": 7.0}, {"step": 2, "loss": 6.5}]).columns["loss"].tolist()
    [7.0, 6.5]
    """
    history = _Gathering()
    for number, record in enumerate(records, start=1):
        try:
            history.add(record)
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
            problem = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise PenstockError(f"Record {number} of the metrics is broken: {problem}", fix=_FIX) from None
    if not history.steps:
        raise PenstockError("The run has not recorded a step yet", fix="Try again after its first step.")
    return history.result()


class _Gathering:
    def __init__(self) -> None:
        self.steps = array("d")
        self._columns = {name: array("d") for name in STEP_METRICS}
        self._validation_steps, self._validation_loss = array("d"), array("d")
        self._validation_bits = array("d")
        self._validation_rewards = {name: array("d") for name in REWARDS}
        self._heldout: dict[str, dict[str, float]] = {}
        self._tasks: dict[str, list[TaskScore]] = {}
        self._starts: list[Start] = []
        self._corpus_tokens: dict[str, int] = {}
        self._points: list[MixturePoint] = []
        self._stride = 1
        self._changes: list[MixtureChange] = []
        self._traffic: Traffic | None = None
        self._skipped: list[Skipped] = []
        self._slowest: dict[int, Slowest] = {}
        self._samples: dict[int, SampleSet] = {}
        self._early_end: EarlyEnd | None = None
        self._num_ignored = 0
        self._of_events: dict[object, Callable[[Record], None]] = {
            "start": self._add_start,
            "mixture": self._add_mixture,
            "sequence_length": self._add_length,
            "traffic": self._add_traffic,
            "skipped": self._add_skipped,
            "ranks": self._add_ranks,
            "samples": self._add_samples,
            "early_stop": self._add_early_end,
            "evaluation": self._add_scores,
            "request": lambda _: None,  # its effects are records of their own
        }

    def add(self, record: Record) -> None:
        event = record.get("event")
        if event in self._of_events:
            self._of_events[event](record)
        elif "validation_loss" in record:
            self._add_validation(record)
        elif "loss" in record:
            self._add_step(record)
        else:
            self._num_ignored += 1

    def _add_start(self, record: Record) -> None:
        self._starts.append(_start(record))

    def _add_mixture(self, record: Record) -> None:
        step, tokens, reason = int(record["step"]), int(record["tokens"]), str(record["reason"])
        self._changes.append(MixtureChange(step, tokens, reason))

    def _add_length(self, record: Record) -> None:
        reason = f"sequence length {int(record['after']):,}"
        self._changes.append(MixtureChange(int(record["step"]), int(record["tokens"]), reason))

    def _add_traffic(self, record: Record) -> None:
        sent = {str(axis): int(number) for axis, number in record["sent_bytes"].items()}
        far = tuple(map(str, record["network_axes"]))
        self._traffic = Traffic(step=int(record["step"]), sent_bytes=sent, network_axes=far)

    def _add_skipped(self, record: Record) -> None:
        self._skipped.append(Skipped(int(record["step"]), str(record["why"])))

    def _add_ranks(self, record: Record) -> None:
        rank = self._slowest.setdefault(int(record["slowest_rank"]), Slowest())
        rank.times += 1
        ratio = _number(record["slowest_s"]) / max(_number(record["median_s"]), 1e-9)
        rank.ratio = max(rank.ratio, ratio)

    def _add_validation(self, record: Record) -> None:
        self._validation_steps.append(int(record["step"]))
        self._validation_loss.append(_number(record["validation_loss"]))
        self._validation_bits.append(_number(record.get("validation_bits_per_byte")))
        for name, column in self._validation_rewards.items():
            column.append(_number(record.get(f"validation_{name}")))
        self._heldout = _heldout(record)

    def _add_scores(self, record: Record) -> None:
        errors = record.get("task_stderrs", {})
        for name, value in record["task_scores"].items():
            error = errors.get(name)
            score = TaskScore(
                step=int(record["step"]),
                value=_number(value),
                stderr=None if error is None else _number(error),
            )
            self._tasks.setdefault(str(name), []).append(score)

    def _add_step(self, record: Record) -> None:
        step = int(record["step"])
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step {step} comes after step {self.steps[-1]:.0f}")
        self.steps.append(step)
        for name, column in self._columns.items():
            column.append(_number(record.get(name)))
        self._corpus_tokens = {name: int(n) for name, n in record.get("corpus_tokens", {}).items()}
        if len(self._corpus_tokens) > 1 and len(self.steps) % self._stride == 0:
            self._points.append(self._point())
            if len(self._points) >= 2 * _MIXTURE_POINTS:
                self._points, self._stride = self._points[1::2], 2 * self._stride

    def _add_early_end(self, record: Record) -> None:
        self._early_end = EarlyEnd(int(record["step"]), int(record["best_step"]))

    def _add_samples(self, record: Record) -> None:
        step = int(record["step"])
        answers = tuple(
            SampleAnswer(
                prompt=str(answer["prompt"]),
                answer=str(answer["answer"]),
                reference=None if answer.get("reference") is None else str(answer["reference"]),
                is_cut=answer.get("finish") == "length",
            )
            for answer in record["answers"]
        )
        self._samples[step] = SampleSet(step, answers)
        if len(self._samples) > 2 * _SAMPLE_SETS:
            self._samples = {s: self._samples[s] for s in [*self._samples][::2]}  # the first stays

    def _point(self) -> MixturePoint:
        tokens = self._corpus_tokens
        return MixturePoint(int(self.steps[-1]), sum(tokens.values()), tokens)

    def _mixture(self) -> tuple[MixturePoint, ...]:
        last = self._point()
        ended = self._points and self._points[-1].step == last.step
        return (*self._points, *([] if ended else [last]))

    def result(self) -> History:
        return History(
            steps=np.frombuffer(self.steps),
            columns={name: np.frombuffer(column) for name, column in self._columns.items()},
            validation_steps=np.array(self._validation_steps),
            validation_loss=np.array(self._validation_loss),
            validation_bits=np.array(self._validation_bits),
            validation_rewards={name: np.array(column) for name, column in self._validation_rewards.items()},
            heldout=self._heldout,
            tasks={name: tuple(scores) for name, scores in self._tasks.items()},
            starts=tuple(self._starts),
            corpus_tokens=self._corpus_tokens,
            mixture=self._mixture(),
            mixture_changes=tuple(self._changes),
            traffic=self._traffic,
            skipped=tuple(self._skipped),
            slowest=self._slowest,
            samples=tuple(self._samples.values()),
            early_end=self._early_end if self._early_end and self._early_end.step == self.steps[-1] else None,
            num_ignored=self._num_ignored,
        )


def _start(record: Record) -> Start:
    changes = record.get("changes", {}).items()
    ranks, threads = int(record["ranks"]), int(record.get("threads", 1))
    if ranks < 1 or threads < 1:
        raise ValueError(f"a start of {ranks} ranks with {threads} threads")
    return Start(
        step=int(record["step"]),
        ranks=ranks,
        time=str(record["time"]),
        device=str(record.get("device", "")),
        threads=threads,
        peak_flops=_number(record.get("peak_flops")),
        changes=tuple((str(name), plain(before), plain(now)) for name, (before, now) in changes),
    )


def _heldout(record: Record) -> dict[str, dict[str, float]]:
    """Return the scores of a validation by corpus."""
    found: dict[str, dict[str, float]] = {"": {}}
    for name, value in record.items():
        if name in BY_CORPUS:
            for corpus, number in value.items():
                found.setdefault(corpus, {})[name] = _number(number)
        elif name in METRICS and name != "step":
            found[""][name] = _number(value)
    return found


def _number(value: object) -> float:
    if value is None:  # strict JSON has no NaN
        return float("nan")
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"{value!r} is not a number")

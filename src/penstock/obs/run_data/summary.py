"""Summary of a run: how it ended, its key figures and its tables, as text that a page shows as it is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.toml import plain
from penstock.core.units import Unit, duration, flops, mib, plural, short, si
from penstock.obs.metric_names import METRICS
from penstock.obs.run_data.columns import RunData
from penstock.obs.sinks import Record

Config = Mapping[str, Any]  # Any: a resolved recipe, as JSON holds it
Reply = dict[str, Any]  # Any: JSON values

UNKNOWN = "\u2013"
"""Text for a number that was never recorded."""

_ALL_LEARNED = 0.97
"""Share of learned tokens from which all are: the last token of a row has no label."""
_SAME_PEAK = 0.1
"""Maximum ratio of the measured peaks of one kind of hardware."""
_MAX_STARTS = 200
_MAX_SKIPPED = 50
_MIN_STEPS = 5
"""Steps of the shortest mean at the end of a curve."""
_HELD_OUT = (
    ("loss, nats per token", "corpus_validation_loss", "validation_loss"),
    ("perplexity", "corpus_perplexity", "validation_perplexity"),
    ("bits per byte", "corpus_bits_per_byte", "validation_bits_per_byte"),
)
"""Title, metric of a corpus, metric of all corpora."""


class Figure(NamedTuple):
    """Key figure."""

    metric: str
    """Name in obs/metric_names.py."""
    title: str
    value: str
    note: str = ""
    """Second, smaller line."""


class SummaryTable(NamedTuple):
    """Table; the first cell of a row is its heading."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start of the run's processes, the first or a later one."""

    step: int
    """Number of steps before this start."""
    ranks: int | None
    """Number of processes from here on; None: the record has no such number."""
    time: str
    changes: str
    """Settings of the recipe that differ from the start before."""
    has_peak: bool
    """True if a device is named; False in old logs, which have no peak either."""
    peak_flops: float
    """Peak FLOP/s of all ranks; NaN if it could not be measured without other load."""
    peak_of_each: float
    """Peak of one GPU, or of one CPU thread: identifies the hardware, independent of its number."""
    kernels: Mapping[str, Any]
    """Operation and its shape -> its kernel, the times of the candidates, and those left out."""


def setting(config: Config, dotted: str) -> Any:
    """Return a recipe's setting by its dotted path; None if it is missing.

    >>> setting({"run": {"steps": 60}}, "run.steps"), setting({}, "run.steps")
    (60, None)
    """
    node: Any = config
    for key in dotted.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def summary_of(data: RunData, config: Config) -> Reply:
    """Return the summary of a run: how it ended if that is unusual, figures and tables.

    Args:
        data: what the run has recorded.
        config: the resolved recipe.
    """
    starts = starts_of(data)
    return {
        "ended": _ended(data),
        "about": _about(config),
        "figures": [
            {**figure._asdict(), "meaning": _meaning(figure.metric)}
            for figure in (_figures(data, config, starts) if data.num_rows() else ())
        ],
        "tables": [table._asdict() for table in _tables(data, starts) if table.rows],
    }


def starts_of(data: RunData) -> list[Start]:
    """Return the starts of a run, in order."""
    return [_start(record) for record in data.starts]


def same_peak(peaks: Sequence[float]) -> bool:
    """Return True if all peaks are known and of the same hardware: measurements differ by a few percent.

    >>> same_peak([1e12, 1.04e12]), same_peak([1e12, 2e12]), same_peak([1e12, float("nan")])
    (True, False, False)
    """
    return all(np.isfinite(peaks)) and max(peaks) <= (1 + _SAME_PEAK) * min(peaks)


def _start(record: Record) -> Start:
    ranks, threads, peak = (_positive(record.get(name)) for name in ("ranks", "threads", "peak_flops"))
    device, changes, kernels = (record.get(name) for name in ("device", "changes", "kernels"))
    share = (ranks or math.nan) * ((threads or 1) if device == "cpu" else 1)
    return Start(
        step=record["step"],
        ranks=None if ranks is None else int(ranks),
        time=str(record.get("time") or UNKNOWN).replace("T", " ").removesuffix("+00:00"),
        changes="; ".join(_changes(changes)) if isinstance(changes, Mapping) else "",
        has_peak=bool(device),
        peak_flops=math.nan if peak is None else peak,
        peak_of_each=math.nan if peak is None else peak / share,
        kernels=kernels if isinstance(kernels, Mapping) else {},
    )


def _changes(changes: Mapping[str, Any]) -> Iterator[str]:
    for name, pair in changes.items():
        before, now = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        yield f"{name} {plain(before)} \u2192 {plain(now)}"


def _positive(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isinstance(value, int | float) and 0 < value < 1e30 else None


def _ended(data: RunData) -> str:
    """Return how a run ended, if it neither took all its steps nor was stopped; else ""."""
    if not data.num_rows():
        return ""
    step, loss = int(data.column("step")[-1]), data.column("loss")[-1]
    if not np.isfinite(loss):
        return f"diverged at step {step:,}"
    record = data.newest.get("early_stop")
    best = None if record is None or record["step"] != step else record.get("best_step")
    return f"stopped early, best at step {best:,}" if isinstance(best, int) else ""


def _about(config: Config) -> str:
    parts = (
        ("{}", "model.model_type"),
        ("layers {}", "model.num_hidden_layers"),
        ("hidden size {}", "model.hidden_size"),
        ("vocabulary {}", "model.vocab_size"),
        ("rows of {} tokens", "data.sequence_length"),
        ("{} rows a step", "data.global_batch_size"),
        ("{}", "compute"),
    )
    values = [(form, setting(config, name)) for form, name in parts]
    return " \u00b7 ".join(form.format(_grouped(value)) for form, value in values if value is not None)


def _grouped(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else plain(value)


def _meaning(metric: str) -> str:
    unit, meaning = METRICS[metric]
    return f"{meaning} ({unit})" if unit else meaning


def _figures(data: RunData, config: Config, starts: Sequence[Start]) -> Iterator[Figure]:
    step, tokens, loss = (data.column(name) for name in ("step", "tokens", "loss"))
    wanted = setting(config, "run.steps")
    of_all = f"of {wanted:,}, " if isinstance(wanted, int) else ""
    trained = f"{of_all}{duration(float(np.nansum(data.column('step_s'))))} of training"
    window = min(max(_MIN_STEPS, len(loss) // 50 | 1), len(loss))
    last = loss[-window:][np.isfinite(loss[-window:])]
    mean = f"{short(float(last.mean()))} over the last {window:,} steps" if len(last) else ""
    yield Figure("step", "steps", f"{step[-1]:,.0f}", trained)
    yield Figure("tokens", "tokens", _count(tokens[-1]), f"{_count(tokens[-1] / max(step[-1], 1))} a step")
    yield from _learned_figure(data, config)
    yield Figure("loss", "final training loss", short(loss[-1]), mean)
    yield _validation_figure(data)
    yield from _bits_figure(data)
    yield _median(data, "tokens_per_s", "tokens/s")
    yield _mfu_figure(data, starts)
    yield _median(data, "data_wait_share", "data-wait share", unit="share")
    memory = data.column("memory_bytes")
    most = mib(float(np.nanmax(memory))) if np.isfinite(memory).any() else UNKNOWN
    yield Figure("memory_bytes", "peak memory", most, "of the first process")


def _learned_figure(data: RunData, config: Config) -> Iterator[Figure]:
    """Yield the number of learned tokens, if some tokens are not to be learned; or of answers."""
    labels, tokens = data.column("labels"), np.diff(data.column("tokens"), prepend=0.0)
    if np.isfinite(data.column("reward_margin")).any():
        title = "answers" if setting(config, "tune.loss") == "kto" else "pairs of answers"
        answers = labels[np.isfinite(labels)]
        note = f"{answers.mean():,.1f}".removesuffix(".0") + " a step" if len(answers) else ""
        yield Figure("labels", title, f"{answers.sum():,.0f}", note)
        return
    known = np.isfinite(labels) & np.isfinite(tokens)
    known[:1] = False  # the first record may follow lost ones
    total = float(tokens[known].sum())
    if total > 0 and (share := float(labels[known].sum()) / total) <= _ALL_LEARNED:
        note = f"{short(share, unit='share')} of the tokens"
        yield Figure("labels", "learned tokens", _count(float(np.nansum(labels))), note)


def _validation_figure(data: RunData) -> Figure:
    name, title = "validation_loss", "validation loss"
    losses = data.column(name, table="validations")
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return Figure(name, title, UNKNOWN, "not validated")
    if len(losses) == 1:
        return Figure(name, title, short(losses[0]), "once")
    value = f"{short(losses[0])} \u2192 {short(losses[-1])}"
    return Figure(name, title, value, f"best of {len(losses):,}: {short(losses.min())}")


def _bits_figure(data: RunData) -> Iterator[Figure]:
    bits = data.column("validation_bits_per_byte", table="validations")
    bits = bits[np.isfinite(bits)]
    if len(bits):
        ends = dict.fromkeys((0, len(bits) - 1))
        value = " \u2192 ".join(short(bits[end]) for end in ends)
        yield Figure("validation_bits_per_byte", "bits per byte", value, "the same measure for any tokenizer")


def _mfu_figure(data: RunData, starts: Sequence[Start]) -> Figure:
    """Return the MFU since the peak that it is relative to last changed."""
    since = -math.inf
    for before, start in pairwise(starts):
        if not same_peak([before.peak_of_each, start.peak_of_each]):
            since = start.step
    found = _median(data, "mfu", "MFU", unit="share", where=data.column("step") > since)
    if not starts or not starts[-1].has_peak:
        return found
    if math.isnan(starts[-1].peak_flops):
        return found._replace(value=UNKNOWN, note="the peak could not be measured without other load")
    note = f"of {flops(starts[-1].peak_flops)}" + (f", from step {since:,} on" if since > 0 else "")
    return found._replace(note=note)


def _median(
    data: RunData,
    name: str,
    title: str,
    *,
    unit: Unit = "number",
    where: npt.NDArray[np.bool_] | None = None,
) -> Figure:
    values = data.column(name) if where is None else data.column(name)[where]
    values = values[np.isfinite(values)]
    if not len(values):
        return Figure(name, f"median {title}", UNKNOWN)
    low, middle, high = (float(part) for part in np.quantile(values, (0.1, 0.5, 0.9)))
    percent = partial(short, unit="share")
    write, roughly = (percent, percent) if unit == "share" else (_count, si)
    return Figure(
        name, f"median {title}", write(middle), f"{roughly(low)} to {roughly(high)} in 80% of steps"
    )


def _tables(data: RunData, starts: Sequence[Start]) -> Iterator[SummaryTable]:
    yield _traffic(data)
    yield _skipped(data)
    yield _corpora(data)
    yield _heldout(data)
    yield _tasks(data)
    yield _starts(data, starts)
    yield _kernels(starts)


def _traffic(data: RunData) -> SummaryTable:
    record = data.newest.get("traffic") or {}
    sent, over = record.get("sent_bytes"), record.get("network_axes")
    axes = (
        {axis: float(number) for axis, number in sent.items() if _positive(number)}
        if isinstance(sent, Mapping)
        else {}
    )
    network = over if isinstance(over, list) else []
    step_s = data.column("step_s")
    seconds = float(np.nanmedian(step_s)) if np.isfinite(step_s).any() else math.nan
    rows = [
        (
            axis,
            mib(number),
            "network" if axis in network else "within a machine",
            f"{si(8 * number / seconds)}bit/s" if seconds > 0 else UNKNOWN,
        )
        for axis, number in sorted(axes.items(), key=lambda item: -item[1])
    ]
    title = f"Traffic of a step, counted at step {record.get('step', 0):,}"
    return SummaryTable(title, ("mesh axis", "sent by the first process", "over", "mean rate"), rows)


def _skipped(data: RunData) -> SummaryTable:
    skipped = [event for event in data.events if event["kind"] == "skip"]
    shown = f", the last {_MAX_SKIPPED}" if len(skipped) > _MAX_SKIPPED else ""
    rows = [(f"{event['step']:,}", event["text"]) for event in skipped[-_MAX_SKIPPED:]]
    return SummaryTable(f"{plural(len(skipped), 'step')} not taken{shown}", ("step", "why"), rows)


def _corpora(data: RunData) -> SummaryTable:
    names = [name for name in data.tables["steps"] if name.startswith("corpus_tokens/")]
    last = {name.partition("/")[2]: float(data.column(name)[-1]) for name in names}
    tokens = {name: number for name, number in last.items() if math.isfinite(number)}
    total = sum(tokens.values()) or 1.0
    most_first = sorted(tokens.items(), key=lambda item: -item[1]) if len(tokens) > 1 else []
    rows = [(name, f"{number:,.0f}", f"{number / total:.1%}") for name, number in most_first]
    return SummaryTable("Tokens by corpus", ("corpus", "tokens", "share"), rows)


def _heldout(data: RunData) -> SummaryTable:
    table = data.tables["validations"]
    last = {name: float(values[-1]) for name, values in table.items() if math.isfinite(values[-1])}
    own = {metric for _, metric, _ in _HELD_OUT}
    corpora = [
        *dict.fromkeys(of for metric, _, of in (name.partition("/") for name in last) if of and metric in own)
    ]
    rows = [[name, *(_known(last.get(f"{metric}/{name}")) for _, metric, _ in _HELD_OUT)] for name in corpora]
    if len(corpora) > 1:
        rows.append(["all", *(_known(last.get(metric)) for _, _, metric in _HELD_OUT)])
    title = f"Held-out text, after step {last.get('step', 0):,.0f}"
    return SummaryTable(title, ("corpus", *(title for title, _, _ in _HELD_OUT)), rows)


def _tasks(data: RunData) -> SummaryTable:
    rows = []
    steps = data.column("step", table="tasks")
    for name, values in data.tables["tasks"].items():
        kind, _, task = name.partition("/")
        known = np.flatnonzero(np.isfinite(values))
        if kind == "task_scores" and task and len(known):
            ends = (f"{short(float(values[i]))} (step {steps[i]:,.0f})" for i in (known[0], known[-1]))
            error = float(data.column(f"task_stderrs/{task}", table="tasks")[known[-1]])
            rows.append((task, *ends, _known(error), f"{len(known):,}"))
    head = ("task and metric", "first", "last", "its standard error", "evaluations")
    return SummaryTable("Tasks", head, rows)


def _starts(data: RunData, starts: Sequence[Start]) -> SummaryTable:
    steps, rate = data.column("step"), data.column("tokens_per_s")
    ends = [start.step for start in starts[1:]] + [steps[-1] if len(steps) else 0]
    rows = []
    for start, end in zip(starts, ends, strict=False):
        first, past = np.searchsorted(steps, (start.step, end), side="right")
        rates = rate[first:past][np.isfinite(rate[first:past])]
        rows.append(
            (
                f"{start.step:,}",
                UNKNOWN if start.ranks is None else f"{start.ranks:,}",
                start.time,
                f"{max(past - first, 0):,}",
                _count(float(np.median(rates))) if len(rates) else UNKNOWN,
                UNKNOWN if math.isnan(start.peak_flops) else flops(start.peak_flops),
                start.changes,
            )
        )
    head = (
        "at step",
        "ranks",
        "time, UTC",
        "steps taken",
        "median tokens/s",
        "peak",
        "changed in the recipe",
    )
    left_out = len(rows) - _MAX_STARTS
    note = f"The {left_out:,} starts before these are left out." if left_out > 0 else ""
    return SummaryTable("Starts", head, rows[-_MAX_STARTS:], note)


def _kernels(starts: Sequence[Start]) -> SummaryTable:
    """Return the table of the newest start's kernels, and by how much each was faster than the next."""
    rows = []
    for key, row in starts[-1].kernels.items() if starts else ():
        if not isinstance(row, Mapping):
            continue
        kernel, us, out = str(row.get("kernel", UNKNOWN)), *(row.get(name) or {} for name in ("us", "out"))
        times = (
            {name: time for name, time in us.items() if _positive(time)} if isinstance(us, Mapping) else {}
        )
        own, others = times.get(kernel), {name: time for name, time in times.items() if name != kernel}
        lead = f"{min(others.values()) / own:.2f} times" if own and others else UNKNOWN
        said = [f"{name} {time:,.4g} us" for name, time in others.items()]
        said += [f"{name} out: {why}" for name, why in out.items()] if isinstance(out, Mapping) else []
        rows.append((str(key), kernel, f"{own:,.4g} us" if own else UNKNOWN, lead, "; ".join(said)))
    head = ("operation", "kernel", "time", "faster than the next", "others")
    return SummaryTable("Kernels of the last start", head, rows)


def _known(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else short(value)


def _count(value: float) -> str:
    if not np.isfinite(value):
        return UNKNOWN
    return short(value) if value < 1000 else f"{value:,.0f}" if value < 1e6 else si(value)

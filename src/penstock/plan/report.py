"""Plan report: text, JSON, a drawing of the step, and a trace. Pure functions.

The drawing has one lane per stream, in the colours of the run report: compute, gather, reduce. Where the
compute lane is empty, the device waits. It shows at most three micro-batches: the first, the last, and one in
between, which the others equal.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from penstock.core.units import duration, mib, short, si
from penstock.plan.candidates import Question
from penstock.plan.hardware import Cluster
from penstock.plan.predict import Prediction
from penstock.plan.search import Help, Option, SearchResult
from penstock.plan.timeline import Span, Stream

_DAY_S, _HOUR_S = 86_400, 3_600
_MAX_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Result of a search, for a person or a script."""

    question: Question
    cluster: Cluster
    found: SearchResult
    helps: Sequence[Help]
    tokens: float
    """Tokens to train on; 0: not given."""
    steps: int = 0
    """Steps of those tokens, if the length of the run is given in epochs."""
    epochs: float | None = None
    """That length."""

    @property
    def seconds(self) -> float:
        """Duration of training on the tokens."""
        return self.tokens / (self.found.best.speed * self.cluster.num_devices)

    @property
    def cost(self) -> float:
        """Cost of training on the tokens, in the currency of the cluster's file; 0: unknown."""
        return self.seconds / _HOUR_S * self.cluster.nodes * self.cluster.price_per_node_hour

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; every quantity has its unit in its name."""
        question, cluster = self.question, self.cluster
        rows = question.global_batch_size
        values: dict[str, Any] = {
            "cluster": {
                "name": cluster.name,
                "nodes": cluster.nodes,
                "devices": cluster.num_devices,
                "device": cluster.device.name,
            },
            "parameters": question.step.model.num_parameters,
            "tokens_per_step": rows * question.step.sequence_length,
            "plans_tried": self.found.tried,
            "plans_simulated": self.found.simulated,
            "best": option_json(self.found.best),
            "why_chosen": why_chosen(self.found) or None,
            "pareto": [option_json(option) for option in self.found.pareto],
            "helps": [one._asdict() for one in self.helps],
        }
        if self.tokens:
            values |= {"tokens": self.tokens, "days": self.seconds / _DAY_S, "cost": self.cost or None}
        if self.epochs:
            values |= {"steps": self.steps, "epochs": self.epochs}
        return values

    def as_text(self) -> str:
        """Return it as text."""
        return "\n".join(_lines(self))


def option_json(option: Option) -> dict[str, Any]:
    """Return one plan as JSON values."""
    job, prediction, memory = option.job, option.prediction, option.memory
    axes = ("pipeline", "replicate", "shard", "context", "tensor")
    return {
        "layout": {axis: getattr(job.layout, axis) for axis in axes},
        "stages_per_rank": job.stages_per_rank,
        "micro_batch_size": job.micro_batch_size,
        "micro_batches": job.num_micro_batches,
        "activations": dict(Counter(job.block_modes)),
        "window_mib": job.window_mib,
        "keep_mib": "inf" if job.keep_mib == float("inf") else job.keep_mib,
        "schedule": job.schedule,
        "gather": job.gather,
        "reduce": job.reduce,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "band": prediction.band,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "step_s": prediction.step_s,
        "step_split_s": split(prediction),
        "network_gbit_s_per_node": prediction.network_gbit_s,
        "memory_bytes": {**memory.parts, "total": memory.total},
        "memory_moment": memory.moment,
        "limit": prediction.limit,
    }


def split(prediction: Prediction) -> dict[str, float]:
    """Return the seconds of a step by cause."""
    return {
        "compute": prediction.compute_s,
        "waiting for links in the node": prediction.exposed_s["node"],
        "waiting for the network": prediction.exposed_s["network"],
        "pipeline bubble": prediction.bubble_s,
        "allocator stalls": prediction.stall_s,
        "optimizer": prediction.update_s,
        "data": prediction.data_s,
        "checkpoints": prediction.checkpoint_s,
        "slow devices": prediction.straggler_s,
    }


def described(option: Option) -> str:
    """Return a one-line description of a plan."""
    job = option.job
    said = [str(job.layout)]
    if job.stages_per_rank > 1:
        said.append(f"{job.stages_per_rank} stages a rank")
    said.append(f"{job.num_micro_batches} x {job.micro_batch_size} rows")
    again = Counter(mode for mode in job.block_modes if mode != "keep")
    if len(set(job.block_modes)) > 1:
        some = " and ".join(f"{mode} in {blocks}" for mode, blocks in again.items())
        said.append(f"recompute {some} of {len(job.block_modes)} blocks")
    elif again:
        said.append(f"recompute {job.block_modes[0]}")
    if job.schedule != "depth_first":
        said.append("breadth first")
    if job.keep_mib:
        said.append("all kept" if job.keep_mib == float("inf") else f"keep {mib(job.keep_mib * 2**20)}")
    if job.window_mib:
        said.append(
            "no window" if job.window_mib == float("inf") else f"window {mib(job.window_mib * 2**20)}"
        )
    said += [f"gather {job.gather}"] * (job.gather != "compute")
    said += [f"reduce {job.reduce}"] * (job.reduce != "float32")
    return ", ".join(said)


def _lines(report: PlanReport) -> Iterator[str]:
    best, cluster = report.found.best, report.cluster
    step = report.question.global_batch_size * report.question.step.sequence_length
    yield (
        f"{si(report.question.step.model.num_parameters)} parameters, {si(step)} tokens a step, on "
        f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}, "
        f"{cluster.nics} x {cluster.nic_gbit_s:g} Gbit/s by {cluster.transport.upper()}"
    )
    yield f"{report.found.tried:,} plans considered, {report.found.simulated:,} simulated"
    yield ""
    yield from _table(report.found)
    yield ""
    yield f"Chosen (*): {described(best)}"
    if reason := why_chosen(report.found):
        yield f"  {reason}"
    yield from (f"  {line}" for line in _about(best))
    if report.tokens:
        price = f", {report.cost:,.0f} for the machines" if report.cost else ""
        days = report.seconds / _DAY_S
        time = duration(report.seconds) if days < 0.05 else f"{days:,.1f} days ({duration(report.seconds)})"
        length = f" in {report.steps:,} steps, {report.epochs:g} epochs" if report.epochs else ""
        yield f"  {si(report.tokens)} tokens{length}: {time}{price}"
    yield f"  limited by {best.prediction.limit}"
    for one in report.helps[:5]:
        yield f"  {one.change}: {one.gain:+.0%}{'' if one.exact else ' (trains other numbers)'}"


def _table(found: SearchResult) -> Iterator[str]:
    rows = [found.best, *(option for option in found.pareto if option is not found.best)][:_MAX_ROWS]
    width = max(len(described(option)) for option in rows)
    yield f"  {'plan':<{width}}  tokens/s/device  error up to   MFU     step      memory"
    for option in rows:
        prediction = option.prediction
        yield (
            f"{'*' if option is found.best else ' '} {described(option):<{width}}  {option.speed:>15,.0f}  "
            f"{prediction.band:>11.0%}  {prediction.mfu:4.0%}  {duration(prediction.step_s):>7}  "
            f"{mib(option.memory.total):>10}"
        )


def why_chosen(found: SearchResult) -> str:
    """Return why the plan was chosen although another is predicted faster; "" if none is.

    Plans are ranked by predicted speed minus half of the error band; among those within 2% of the first, the
    simplest is chosen (`search.best`).
    """
    best, fastest = found.best, max(found.pareto, key=lambda option: option.speed)
    if fastest.speed <= best.speed:
        return ""
    if fastest.cautious <= best.cautious:
        return (
            f"The plan at {fastest.speed:,.0f} tokens/s is predicted faster, but with an error of up to "
            f"{fastest.prediction.band:.0%} where the chosen plan's is {best.prediction.band:.0%}: less half "
            f"of that it gives {fastest.cautious:,.0f}, the chosen plan {best.cautious:,.0f}."
        )
    return (
        f"The plan at {fastest.speed:,.0f} tokens/s is faster by {fastest.speed / best.speed - 1:.1%}, which "
        "is less than predictions can tell; the chosen plan is simpler."
    )


def _about(option: Option) -> Iterator[str]:
    prediction, memory = option.prediction, option.memory
    low, high = (option.speed * (1 + side * prediction.band) for side in (-1, 1))
    yield f"tokens/s/device  {option.speed:,.0f} ({low:,.0f} to {high:,.0f}), MFU {prediction.mfu:.1%}"
    parts = split(prediction)
    shares = ", ".join(
        f"{name} {seconds / prediction.step_s:.0%}"
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1])
        if seconds >= 0.005 * prediction.step_s
    )
    yield f"step             {duration(prediction.step_s)}: {shares}"
    taken = sorted(memory.parts.items(), key=lambda part: -part[1])
    sizes = ", ".join(f"{name} {mib(size)}" for name, size in taken if size >= 0.01 * memory.total)
    yield f"memory           {mib(memory.total)} in the {memory.moment}: {sizes}"
    yield f"network          {prediction.network_gbit_s:.3g} Gbit/s a node"


_WIDTH, _LEFT, _RIGHT, _TOP = 960, 78, 14, 46
_LANE, _GAP, _BOTTOM = 44, 12, 40
_TICKS = 5
_LANES: tuple[Stream, ...] = ("compute", "gather", "reduce")
_COLOURS = {"none": "#0072b2", "node": "#009e73", "network": "#d55e00"}  # Okabe and Ito, 2008
_MEANING = {"none": "computing", "node": "links in the node", "network": "the network"}
_MICROSECONDS = 1e6


def svg(events: Sequence[Span], *, title: str) -> str:
    """Return the timeline as SVG text."""
    end = max((event.start_s + event.seconds for event in events), default=1.0)
    height = _TOP + len(_LANES) * (_LANE + _GAP) + _BOTTOM
    bars = "".join(_bar(event, end) for event in events)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>'
        f"{_legend()}{_lanes()}{bars}{_seconds(end, height - _BOTTOM)}</svg>\n"
    )


def trace(events: Sequence[Span]) -> dict[str, Any]:
    """Return the timeline in the Trace Event Format: complete events, times in microseconds."""
    named = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": stream}}
        for lane, stream in enumerate(_LANES)
    ]
    slices = [
        {
            "name": event.name,
            "cat": event.stream,
            "ph": "X",
            "pid": 0,
            "tid": _LANES.index(event.stream),
            "ts": event.start_s * _MICROSECONDS,
            "dur": event.seconds * _MICROSECONDS,
            "args": {"link": event.link, "micro_batch": event.micro_batch},
        }
        for event in events
    ]
    return {"traceEvents": [*named, *slices], "displayTimeUnit": "ms"}


def _x(seconds: float, end: float) -> float:
    return _LEFT + seconds / end * (_WIDTH - _LEFT - _RIGHT)


def _y(stream: Stream) -> int:
    return _TOP + _LANES.index(stream) * (_LANE + _GAP)


def _bar(event: Span, end: float) -> str:
    left, right = _x(event.start_s, end), _x(event.start_s + event.seconds, end)
    tip = f"{event.name}, micro-batch {event.micro_batch}: {1000 * event.seconds:.2f} ms"
    return (
        f'<rect x="{left:.2f}" y="{_y(event.stream)}" width="{max(0.3, right - left):.2f}" height="{_LANE}" '
        f'fill="{_COLOURS[event.link]}" stroke="#fff" stroke-width=".4"><title>{escape(tip)}</title></rect>'
    )


def _lanes() -> str:
    return "".join(
        f'<text x="{_LEFT - 8}" y="{_y(stream) + _LANE / 2 + 4}" text-anchor="end">{stream}</text>'
        for stream in _LANES
    )


def _legend() -> str:
    items = []
    for number, (link, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 150 * number
        items.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>')
        items.append(f'<text x="{x + 15}" y="37">{_MEANING[link]}</text>')
    return "".join(items)


def _seconds(end: float, y: float) -> str:
    power = 10.0 ** math.floor(math.log10(end / _TICKS))
    gap = next((factor * power for factor in (1, 2, 5) if end / (factor * power) <= _TICKS + 1), 10 * power)
    ticks = "".join(
        f'<text x="{_x(at, end):.1f}" y="{y + 16}" text-anchor="middle">{at:.6g}</text>'
        f'<line x1="{_x(at, end):.1f}" x2="{_x(at, end):.1f}" y1="{y - 4}" y2="{y}" stroke="#888"/>'
        for at in (place * gap for place in range(math.floor(end / gap + 1e-9) + 1))
    )
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#888"/>{ticks}'
        f'<text x="{_WIDTH - _RIGHT}" y="{y + 32}" text-anchor="end">seconds, of {short(end)}</text>'
    )

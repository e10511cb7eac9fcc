"""A plan in words and in JSON: what it gives, where time and memory go, what would help; pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.units import duration, mib, si
from penstock.plan.candidates import Question
from penstock.plan.hardware import Cluster
from penstock.plan.helps import Help
from penstock.plan.predict import Prediction
from penstock.plan.search import Found, Option

_DAY_S, _HOUR_S = 86_400, 3_600
_MOST_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a person or a script may want to know of a search."""

    question: Question
    cluster: Cluster
    found: Found
    helps: Sequence[Help]
    tokens: float
    """To be trained on; 0: not said."""

    @property
    def seconds(self) -> float:
        """That the tokens take."""
        return self.tokens / (self.found.best.speed * self.cluster.num_devices)

    @property
    def cost(self) -> float:
        """Of the tokens, in the currency of the cluster's file; 0: not known."""
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
            "parameters": question.model.num_parameters,
            "tokens_per_step": rows * question.sequence_length,
            "plans_tried": self.found.tried,
            "plans_simulated": self.found.simulated,
            "best": option_json(self.found.best),
            "pareto": [option_json(option) for option in self.found.pareto],
            "helps": [one._asdict() for one in self.helps],
        }
        if self.tokens:
            values |= {"tokens": self.tokens, "days": self.seconds / _DAY_S, "cost": self.cost or None}
        return values

    def as_text(self) -> str:
        """Return it for a person."""
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
    """Return where the seconds of a step go, by name."""
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
    """Say what a plan is in one line."""
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
    if job.keep_mib:
        said.append("all kept" if job.keep_mib == float("inf") else f"keep {mib(job.keep_mib * 2**20)}")
    if job.window_mib:
        said.append(
            "no window" if job.window_mib == float("inf") else f"window {mib(job.window_mib * 2**20)}"
        )
    said += [f"gather {job.gather}"] * (job.gather != "compute")
    said += [f"reduce {job.reduce}"] * (job.reduce != "float32")
    return ", ".join(said)


def _lines(report: Report) -> Iterator[str]:
    best, cluster = report.found.best, report.cluster
    step = report.question.global_batch_size * report.question.sequence_length
    yield (
        f"{si(report.question.model.num_parameters)} parameters, {si(step)} tokens a step, on "
        f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}, "
        f"{cluster.nics} x {cluster.nic_gbit_s:g} Gbit/s by {cluster.transport.upper()}"
    )
    yield f"{report.found.tried:,} plans looked at, {report.found.simulated:,} simulated"
    yield ""
    yield from _table(report.found)
    yield ""
    yield f"Chosen: {described(best)}"
    yield from (f"  {line}" for line in _about(best))
    if report.tokens:
        price = f", {report.cost:,.0f} for the machines" if report.cost else ""
        days = report.seconds / _DAY_S
        yield f"  {si(report.tokens)} tokens: {days:,.1f} days ({duration(report.seconds)}){price}"
    yield f"  limited by {best.prediction.limit}"
    for one in report.helps[:5]:
        yield f"  {one.change}: {one.gain:+.0%}{'' if one.exact else ' (trains other numbers)'}"


def _table(found: Found) -> Iterator[str]:
    rows = [found.best, *(option for option in found.pareto if option is not found.best)][:_MOST_ROWS]
    width = max(len(described(option)) for option in rows)
    yield f"  {'plan':<{width}}  tokens/s/device   MFU     step      memory"
    for option in rows:
        prediction = option.prediction
        yield (
            f"  {described(option):<{width}}  {option.speed:>15,.0f}  {prediction.mfu:4.0%}  "
            f"{duration(prediction.step_s):>7}  {mib(option.memory.total):>10}"
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
    yield f"network          {prediction.network_gbit_s:,.1f} Gbit/s a node"

"""Plan search: the fastest plans for their memory, and changes that would help. Pure functions.

For each layout and micro-batch size, recomputation is the least that fits the memory: less recomputation is
never slower. Memory that is then left may keep parameters and gradients through a step. So of thousands of
plans only a few hundred are simulated.

Other communication settings are tried only for plans that wait for the network: they change neither which
layouts fit nor which are sensible.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from penstock.core.errors import ConfigError
from penstock.core.units import mib
from penstock.parallel.activation_checkpointing_plan import COSTS, Mode
from penstock.plan.candidates import Question, jobs, layouts
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.memory import Memory, peak
from penstock.plan.predict import Prediction, predict

Changes = Callable[[Question, TrainingStep, float], Iterator[TrainingStep]]
"""Yields variants of a job, given the available bytes."""

HEADROOM = 0.15
"""Share of a device's memory reserved for its context, its libraries and the allocator's gaps."""

_GIB, _MIB = 2**30, 2**20
_WORTH = 0.01
"""Minimum share of a step's time for which another communication setting is tried, and accepted."""
_AS_GOOD = 0.02
"""Plans within this share of the fastest are ranked by simplicity: predictions are not more exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Plan with its memory and its prediction."""

    job: TrainingStep
    memory: Memory
    prediction: Prediction

    @property
    def speed(self) -> float:
        """Tokens per second and device."""
        return self.prediction.tokens_per_s_per_device

    @property
    def cautious(self) -> float:
        """Speed minus half of the error band; plain sharding has the narrowest band."""
        return self.speed * (1 - self.prediction.band / 2)

    @property
    def parts(self) -> int:
        """Number of respects in which the plan is more complex than plain sharding."""
        job, layout = self.job, self.job.layout
        return (
            2 * (layout.pipeline > 1)
            + (layout.tensor > 1)
            + (layout.context > 1)
            + (layout.replicate > 1 and layout.shard > 1)
            + (job.stages_per_rank > 1)
            + (job.keep_mib > 0)
            + (job.window_mib > 0)
            + (job.schedule != "depth_first")
            + (job.gather != "compute")
            + (job.reduce != "float32")
            + (job.modes != "keep")
        )


def best(options: Sequence[Option]) -> Option:
    """Return the simplest of the options whose cautious speed is about that of the fastest."""
    fastest = max(option.cautious for option in options)
    near = [option for option in options if option.cautious >= (1 - _AS_GOOD) * fastest]
    return min(near, key=lambda option: (option.parts, -option.cautious))


def pareto(options: Sequence[Option]) -> list[Option]:
    """Return the options that no other beats in both speed and memory, the fastest first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (-o.speed, o.memory.total)):
        if not kept or option.memory.total < kept[-1].memory.total:
            kept.append(option)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of a search."""

    best: Option
    pareto: Sequence[Option]
    """Options of which none is both slower and larger than another; the fastest first."""
    tried: int
    """Plans whose memory was computed."""
    simulated: int
    """Plans that fit and were simulated."""


def search(question: Question, cluster: Cluster, *, headroom: float = HEADROOM) -> SearchResult:
    """Search all plans for a question on a cluster.

    Raises:
        ConfigError: nothing fits; the message has the memory of the smallest plan.
    """
    room = (1 - headroom) * cluster.device.memory_gib * _GIB
    tried, options, smallest = 0, [], None
    for layout, stages in layouts(question, cluster):
        for job in jobs(question, layout, stages, cluster):
            tried += 1
            fitting = list(_fitting(question, job, room))
            options += [_option(j, m, cluster) for j, m in fitting]
            least = peak(replace(job, modes=_modes(question)[-1]), question.kept)
            if smallest is None or least.total < smallest.total:
                smallest = least
    if not options:
        raise _nothing(question, cluster, smallest, room)
    for changes in (_breadth_first, _on_the_wire):
        for option in (best(options), *pareto(options)):
            options += _where_the_network_waits(question, option, cluster, room, changes)
    return SearchResult(best=best(options), pareto=pareto(options), tried=tried, simulated=len(options))


def _option(job: TrainingStep, memory: Memory, cluster: Cluster) -> Option:
    prediction = predict(job, cluster, memory_bytes=memory.total)
    return Option(job=job, memory=memory, prediction=prediction)


def _fitting(question: Question, job: TrainingStep, room: float) -> Iterator[tuple[TrainingStep, Memory]]:
    """Yield a job with the least recomputation that fits: nothing kept, and as many parameters as fit."""
    too_large: Mode | None = None
    for mode in _modes(question):
        plain = replace(job, modes=mode, keep_mib=question.decided.get("keep_mib", 0.0))
        memory = peak(plain, question.kept)
        if memory.total <= room:
            yield plain, memory
            if too_large is not None:
                yield from _mixing(question, plain, too_large, room)
            if "keep_mib" not in question.decided:
                yield from _keeping(question, plain, room - memory.total, room)
            return
        too_large = mode


def _mixing(
    question: Question, job: TrainingStep, mode: Mode, room: float
) -> Iterator[tuple[TrainingStep, Memory]]:
    """Yield a job in which as many of the last blocks as fit recompute less than the others."""
    blocks, rest = job.model.num_hidden_layers, job.block_modes
    most, too_many = 0, blocks
    while too_many - most > 1:
        number = (most + too_many) // 2
        mixed = replace(job, modes=(*rest[number:], *(mode,) * number))
        if peak(mixed, question.kept).total <= room:
            most = number
        else:
            too_many = number
    if most:
        mixed = replace(job, modes=(*rest[most:], *(mode,) * most))
        yield mixed, peak(mixed, question.kept)


def _keeping(
    question: Question, job: TrainingStep, left: float, room: float
) -> Iterator[tuple[TrainingStep, Memory]]:
    """Yield a job that keeps parameters and gradients as far as it pays and there is room for a block."""
    if job.shard_ranks == 1 or job.num_micro_batches == 1 or job.layout.pipeline > 1:
        return
    whole = replace(job, keep_mib=math.inf)
    memory = peak(whole, question.kept)
    if memory.total <= room:
        yield whole, memory
        return
    block = job.largest_block * job.compute_bytes / job.layout.tensor
    if left > 2 * block:
        some = replace(job, keep_mib=float(left // (64 * _MIB) * 64))
        memory = peak(some, question.kept)
        if some.keep_mib and memory.total <= room:
            yield some, memory


def _where_the_network_waits(
    question: Question, option: Option, cluster: Cluster, room: float, changes: Changes
) -> Iterator[Option]:
    """Yield variants of a plan that waits for the network, if they fit and are faster."""
    if option.prediction.exposed_s["network"] < _WORTH * option.prediction.step_s:
        return
    for other in changes(question, option.job, room):
        memory = peak(other, question.kept)
        if memory.total > room:
            continue
        found = _option(other, memory, cluster)
        if found.speed > (1 + _WORTH) * option.speed:
            yield found


def _on_the_wire(question: Question, job: TrainingStep, room: float) -> Iterator[TrainingStep]:  # noqa: ARG001 - as Changes
    """Yield a job with other windows, and with fewer bits if allowed."""
    yield from wider(job, question.decided)
    yield from coded(job, question)


def _breadth_first(question: Question, job: TrainingStep, room: float) -> Iterator[TrainingStep]:
    """Yield a job breadth first, with the least recomputation that fits: it costs activation memory."""
    for other in breadth_first(job, question.decided):
        with_modes = (replace(other, modes=mode) for mode in _modes(question))
        yield from islice((plan for plan in with_modes if peak(plan, question.kept).total <= room), 1)


def _modes(question: Question) -> list[Mode]:
    """Return the possible activation-checkpointing modes, the least recomputation first."""
    return [question.decided["modes"]] if "modes" in question.decided else list(COSTS)


def _nothing(question: Question, cluster: Cluster, smallest: Memory | None, room: float) -> ConfigError:
    devices = cluster.num_devices
    if smallest is None:
        return ConfigError(
            f"No layout shares this model and {question.global_batch_size} rows over {devices} devices",
            got=", ".join(f"{name} = {value}" for name, value in question.decided.items())
            or "nothing decided",
            fix="Use a batch that the devices divide, or fix fewer settings.",
        )
    return ConfigError(
        f"The smallest plan on {devices} devices takes {mib(smallest.total)}, a device has {mib(room)}",
        got=f"{cluster.device.name}, {cluster.device.memory_gib:g} GiB",
        fix="Use more or larger devices, shorter rows, optim.rule 'adamw_8bit', or bfloat16 weights.",
    )


_WORTH_SAYING = 0.01


class Help(NamedTuple):
    """Change of a plan or cluster and its gain."""

    change: str
    gain: float
    """Additional tokens per second, as a share."""
    exact: bool
    """True if the result of training is the same; False: fewer bits are sent or multiplied."""


def what_would_help(job: TrainingStep, cluster: Cluster) -> list[Help]:
    """Return changes that would make a job faster, the most effective first; memory is not considered."""
    now = predict(job, cluster).tokens_per_s_per_device
    found = []
    for change, other_job, other_cluster, exact in _changes(job, cluster):
        try:
            then = predict(other_job, other_cluster).tokens_per_s_per_device
        except ConfigError:  # not possible on these devices
            continue
        if then > (1 + _WORTH_SAYING) * now:
            found.append(Help(change, then / now - 1, exact))
    return sorted(found, key=lambda one: -one.gain)


def _changes(job: TrainingStep, cluster: Cluster) -> Iterator[tuple[str, TrainingStep, Cluster, bool]]:
    if cluster.nodes > 1:
        more = 2 * cluster.nics
        yield f"with {more} NICs a node", job, replace(cluster, nics=more), True
        faster = replace(cluster, nic_gbit_s=4 * cluster.nic_gbit_s, usable_gbit_s=4 * cluster.usable_gbit_s)
        yield f"with NICs of {faster.nic_gbit_s:g} Gbit/s", job, faster, True
        if cluster.transport == "tcp":
            yield "with RDMA instead of TCP", job, replace(cluster, transport="rdma", usable_gbit_s=0.0), True
    twice = replace(job, num_micro_batches=2 * job.num_micro_batches)
    yield "with a batch of twice as many rows", twice, cluster, False
    yield "with no activation computed again", replace(job, modes="keep"), cluster, True
    yield "with all parameters kept through a step", replace(job, keep_mib=math.inf), cluster, True
    if job.layout.pipeline == 1 and job.num_passes > 1:
        change = "with each block run for all micro-batches before the next"
        yield change, replace(job, schedule="breadth_first"), cluster, True
    if job.kernels != "compiled":
        yield "with compiled blocks", replace(job, kernels="compiled"), cluster, True
    if job.gather == "compute":
        yield "with weights gathered in int8", replace(job, gather="int8"), cluster, False
    if job.reduce == "float32":
        yield "with gradients reduced in int8", replace(job, reduce="int8"), cluster, False
    if job.linear == "compute" and cluster.device.float8_tflops:
        yield "with linear layers in float8", replace(job, linear="float8_rowwise"), cluster, False


_WIRE_MIB = 2**20
_WINDOWS = (4, 8)
"""Blocks gathered at once in the variants; a plan begins with two."""


def wider(job: TrainingStep, decided: Mapping[str, Any]) -> Iterator[TrainingStep]:
    """Yield a job with more gathers in flight, if the setting is open."""
    if not job.overlapped or job.shard_ranks == 1 or "window_mib" in decided:
        return
    block = job.largest_block * job.compute_bytes / job.layout.tensor
    for blocks in _WINDOWS:
        yield replace(job, window_mib=float(-(-blocks * block // _WIRE_MIB)))


def breadth_first(job: TrainingStep, decided: Mapping[str, Any]) -> Iterator[TrainingStep]:
    """Yield a job that runs breadth first, gathered twice or once, if the setting is open."""
    is_alone = job.shard_ranks == job.layout.replicate == 1
    if is_alone or job.layout.pipeline > 1 or job.num_passes == 1 or "schedule" in decided:
        return
    yield replace(job, schedule="breadth_first")
    if job.shard_ranks > 1 and "keep_mib" not in decided:
        for keep_mib in {0.0, math.inf} - {job.keep_mib}:
            yield replace(job, schedule="breadth_first", keep_mib=keep_mib)


def coded(job: TrainingStep, question: Question) -> Iterator[TrainingStep]:
    """Yield a job with int8 weights, gradients or both on the wire, if allowed and open."""
    if not question.may_compress or not job.overlapped:
        return
    whole = isinstance(job.reshard_after_forward, bool)
    can_gather = job.shard_ranks > 1 and whole and "gather" not in question.decided
    can_reduce = "reduce" not in question.decided
    if can_gather:
        yield replace(job, gather="int8")
    if can_reduce:
        yield replace(job, reduce="int8")
    if can_gather and can_reduce:
        yield replace(job, gather="int8", reduce="int8")

"""Find the plans worth choosing from: those that fit, the fastest for the memory they take; pure.

For each layout and size of micro-batch, activations are kept as far as memory goes: computing less again is
never slower. What memory is then left may hold parameters and gradients through a step. So of thousands of
plans only a few hundred are simulated.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.core.errors import ConfigError
from penstock.core.units import mib
from penstock.parallel.recompute_plan import COSTS, Mode
from penstock.plan.candidates import Question, jobs, layouts
from penstock.plan.hardware import Cluster
from penstock.plan.job import Job
from penstock.plan.memory import Memory, peak
from penstock.plan.predict import Prediction, predict
from penstock.plan.wire import coded, wider

HEADROOM = 0.15
"""Share of a device's memory that is left to its context, its libraries and the allocator's gaps."""

_GIB, _MIB = 2**30, 2**20
_WORTH = 0.01
"""Share of a step's time for which another setting of its communication is tried, and taken."""
_AS_GOOD = 0.02
"""Plans so near in speed are told apart by how simple they are: predictions are not that exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One plan, what it takes and what it gives."""

    job: Job
    memory: Memory
    prediction: Prediction

    @property
    def speed(self) -> float:
        """Tokens per second and device."""
        return self.prediction.tokens_per_s_per_device

    @property
    def cautious(self) -> float:
        """The speed, less half of its band: that of plain sharding is the narrowest."""
        return self.speed * (1 - self.prediction.band / 2)

    @property
    def parts(self) -> int:
        """In how many ways the plan is more than plain sharding."""
        job, layout = self.job, self.job.layout
        return (
            2 * (layout.pipeline > 1)
            + (layout.tensor > 1)
            + (layout.context > 1)
            + (layout.replicate > 1 and layout.shard > 1)
            + (job.stages_per_rank > 1)
            + (job.keep_mib > 0)
            + (job.window_mib > 0)
            + (job.gather != "compute")
            + (job.reduce != "float32")
            + (job.modes != "keep")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to."""

    best: Option
    pareto: Sequence[Option]
    """None of them is both slower and larger than another; the fastest first."""
    tried: int
    """Plans whose memory was worked out."""
    simulated: int
    """Those that fit and were timed."""


def search(question: Question, cluster: Cluster, *, headroom: float = HEADROOM) -> Found:
    """Search all plans for a question on a cluster.

    Raises:
        ConfigError: nothing fits; with what the smallest plan takes.
    """
    room = (1 - headroom) * cluster.device.memory_gib * _GIB
    tried, options, smallest = 0, [], None
    for layout, stages in layouts(question, cluster):
        for job in jobs(question, layout, stages, cluster):
            tried += 1
            fitting = list(_fitting(question, job, room))
            options += [Option(job=j, memory=m, prediction=predict(j, cluster)) for j, m in fitting]
            least = peak(replace(job, modes=_modes(question)[-1]), question.kept)
            if smallest is None or least.total < smallest.total:
                smallest = least
    if not options:
        raise _nothing(question, cluster, smallest, room)
    for option in (best(options), *pareto(options)):
        options += _where_the_network_waits(question, option, cluster, room)
    return Found(best=best(options), pareto=pareto(options), tried=tried, simulated=len(options))


def best(options: Sequence[Option]) -> Option:
    """Return the simplest of the options that are, cautiously, about as fast as the fastest."""
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


def _fitting(question: Question, job: Job, room: float) -> Iterator[tuple[Job, Memory]]:
    """Yield a job with the least recomputation that fits: nothing kept, and as much kept as fits."""
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


def _mixing(question: Question, job: Job, mode: Mode, room: float) -> Iterator[tuple[Job, Memory]]:
    """Yield a job in which as many of the last blocks as fit compute less again than the others."""
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


def _keeping(question: Question, job: Job, left: float, room: float) -> Iterator[tuple[Job, Memory]]:
    """Yield a job with what pays to keep of its parameters and gradients, if there is room for a block."""
    if job.shard_ranks == 1 or job.num_micro_batches == 1 or job.layout.pipeline > 1:
        return
    whole = replace(job, keep_mib=math.inf)
    memory = peak(whole, question.kept)
    if memory.total <= room:
        yield whole, memory
        return
    block = job.block_parameters * job.compute_bytes / job.layout.tensor
    if left > 2 * block:
        some = replace(job, keep_mib=float(left // (64 * _MIB) * 64))
        memory = peak(some, question.kept)
        if some.keep_mib and memory.total <= room:
            yield some, memory


def _where_the_network_waits(
    question: Question, option: Option, cluster: Cluster, room: float
) -> Iterator[Option]:
    """Yield a plan that waits for the network with other windows, and in fewer bits if it may be."""
    if option.prediction.exposed_s["network"] < _WORTH * option.prediction.step_s:
        return
    for other in (*wider(option.job, question.decided), *coded(option.job, question)):
        memory = peak(other, question.kept)
        if memory.total > room:
            continue
        prediction = predict(other, cluster)
        if prediction.tokens_per_s_per_device > (1 + _WORTH) * option.speed:
            yield Option(job=other, memory=memory, prediction=prediction)


def _modes(question: Question) -> list[Mode]:
    """Return what blocks could do with their activations, the least work first."""
    return [question.decided["modes"]] if "modes" in question.decided else list(COSTS)


def _nothing(question: Question, cluster: Cluster, smallest: Memory | None, room: float) -> ConfigError:
    devices = cluster.num_devices
    if smallest is None:
        return ConfigError(
            f"No layout shares this model and {question.global_batch_size} rows over {devices} devices",
            got=", ".join(f"{name} = {value}" for name, value in question.decided.items())
            or "nothing decided",
            fix="Use a batch that the devices divide, or decide less.",
        )
    return ConfigError(
        f"The smallest plan on {devices} devices takes {mib(smallest.total)}, a device has {mib(room)}",
        got=f"{cluster.device.name}, {cluster.device.memory_gib:g} GiB",
        fix="Use more or larger devices, shorter rows, optim.rule 'adamw_8bit', or bfloat16 weights.",
    )

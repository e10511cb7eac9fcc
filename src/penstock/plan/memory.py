"""What takes memory on one device at the fullest moment of a step, part by part, before it runs; no torch.

A step is looked at where it can be fullest, and the fullest of these moments is the answer:

    loss        all blocks have kept their activations; the logits of a chunk, the output matrix's gradient
    backward    in the block computed last, or the one before: what it kept or computes again, its gradients,
                its gathered parameters and the next ones, the buffers of the reduction before
    reduction   of the embedding and the output matrix, which come last and are the largest unit
    update      the optimizer's temporaries

Counted as eager mode on a CPU allocates, to which `benchmarks/plan_memory.py` holds it; a caching allocator
adds its gaps, and libraries and their contexts take what they take: `headroom` of the search is for those.
Shares of what ranks hold are rounded down; the batch itself is not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from penstock.core.units import mib
from penstock.parallel.stages import under_way
from penstock.plan.job import Job
from penstock.plan.rank_bytes import ADAMW, FLOAT32, Kept, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank at one moment, by part."""

    weights: int = 0
    """Its shards, with float32 copies where there are any."""
    optimizer: int = 0
    feedback: int = 0
    """What rounding left out of gradients on the wire."""
    gradients: int = 0
    """Reduced ones."""
    gathered: int = 0
    """Whole parameters, and whole gradients that are not yet reduced."""
    activations: int = 0
    """What blocks keep for their backward, and what is around them."""
    working: int = 0
    """What the block at work computes again, and the temporaries of its backward; those of the update."""
    loss: int = 0
    """Logits, the output matrix's gradient, the gradients of the hidden states."""
    buffers: int = 0
    """What is being gathered, reduced, sent and received."""
    moment: str = ""
    """When."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}

    def lines(self) -> dict[str, str]:
        """Return each part and the total for a person."""
        parts = {f"memory, {name}": mib(size) for name, size in self.parts.items()}
        return {**parts, f"memory, all, in the {self.moment}": mib(self.total)}


def peak(job: Job, kept: Kept = ADAMW) -> Memory:
    """Return the fullest moment of the rank that needs most."""
    places = range(job.layout.pipeline)
    return max((moment for place in places for moment in moments(job, kept, place)), key=_total)


def moments(job: Job, kept: Kept, place: int = 0) -> Iterator[Memory]:
    """Yield the moments of a step, of a rank at a place of the pipeline."""
    rank = Rank.of(job, kept, place)
    if job.layout.pipeline > 1:
        yield from _in_stages(rank)
    else:
        yield from _in_place(rank) if rank.is_whole else _in_turn(rank)
    update = round(kept.update * rank.all / rank.cut)
    yield replace(_stays(rank), gradients=rank.gradients, working=update, moment="update")


def _total(memory: Memory) -> int:
    return memory.total


def _stays(rank: Rank) -> Memory:
    """What is there at every moment."""
    optimizer = rank.kept.optimizer * rank.in_blocks
    optimizer += rank.kept.optimizer_outside * rank.outside
    weights = round(rank.kept.weights * rank.all / rank.cut)
    return Memory(weights=weights, optimizer=round(optimizer / rank.cut), feedback=rank.feedback)


def _in_place(rank: Rank) -> Iterator[Memory]:
    """Yield the moments of a rank that has all blocks, whole."""
    before = rank.gradients if rank.job.num_micro_batches > 1 else 0
    activations = [rank.of_mode(mode) for mode in rank.modes]
    kept = sum(activations) + rank.around
    yield replace(_stays(rank), gradients=before, activations=kept, loss=rank.loss, moment="loss")
    for index in {len(rank.modes) - 1, 0}:
        done = rank.block * (len(rank.modes) - 1 - index) + (rank.last or rank.first)
        yield replace(
            _stays(rank),
            gradients=before or FLOAT32 * done,
            gathered=rank.down,
            activations=sum(activations[: index + 1]) + rank.tables,
            working=rank.at_work(rank.modes[index]),
            moment="backward",
        )


def _in_turn(rank: Rank) -> Iterator[Memory]:
    """Yield the moments of a rank that has all blocks."""
    unreduced = rank.kept_gradients
    stay = rank.job.num_micro_batches > 1 or (rank.job.on_cpu and rank.is_behind and rank.cut > 1)
    before = rank.gradients if stay else 0  # reductions behind hold the last step's until the next
    before = round(before * (1 - unreduced / (FLOAT32 * rank.all)))
    root, sharded = rank.c * rank.outside, rank.cut > 1
    activations = [rank.of_mode(mode) for mode in rank.modes]
    stays = replace(_stays(rank), gradients=before, gathered=unreduced)
    reduced = round(rank.kept.gradients * rank.block / rank.cut)
    yield replace(
        stays,
        gathered=unreduced + root + rank.after_forward() + rank.turned(rank.after_forward()),
        activations=sum(activations) + rank.around,
        loss=rank.loss,
        buffers=(0 if rank.job.overlapped else rank.ahead) + rank.behind(done=0),
        moment="loss",
    )
    for index in {max(0, len(rank.modes) - back) for back in (1, 2, 3)} | {0}:
        done = len(rank.modes) - 1 - index
        yield from _of_backward(
            rank, replace(stays, gradients=before or reduced * done), activations[: index + 1], root=root
        )
    reduction = FLOAT32 * rank.outside * (1 + 1 / rank.cut if sharded else 1)
    reduction = max(reduction, rank.behind(done=0) + FLOAT32 * rank.outside / rank.cut)
    turned = rank.turned(rank.kept_parameters) if rank.job.num_micro_batches > 1 else 0
    yield replace(
        stays,
        gradients=before or reduced * len(rank.modes),
        gathered=unreduced + root + turned,
        buffers=round(reduction),
        moment="reduction",
    )


def _of_backward(rank: Rank, stays: Memory, activations: list[int], *, root: int) -> Iterator[Memory]:
    """Yield the moments of a block's backward: in its feed-forward, and when its gradients are reduced.

    Args:
        activations: of the blocks up to this one, which is the last.
    """
    index, sharded = len(activations) - 1, rank.cut > 1
    done = len(rank.modes) - len(activations)
    around = stays.gathered + root + rank.c * (rank.last or rank.first)  # the output matrix's gradient
    are_there = rank.after_forward() >= rank.c * rank.block * len(rank.modes)
    ahead = rank.ahead if index and not are_there else 0
    stays = replace(stays, moment="backward")
    yield replace(
        stays,
        gathered=around + max(rank.c * rank.block, rank.after_forward()) + rank.down,
        activations=sum(activations) + rank.tables,
        working=rank.at_work(rank.modes[index]),
        buffers=ahead + rank.behind(done=done),
    )
    yield replace(
        stays,
        gathered=around + rank.c * rank.block,
        activations=sum(activations[:-1]) + rank.tables,
        working=rank.stream,
        buffers=ahead
        + max(FLOAT32 * rank.block, rank.behind(done=done + 1))
        + (FLOAT32 * rank.block // rank.cut if sharded else 0),
    )


def _in_stages(rank: Rank) -> Iterator[Memory]:
    """Yield the moments of a rank that has some of the blocks, and several micro-batches under way."""
    job, ranks = rank.job, rank.job.layout.pipeline
    held = under_way(rank.place, ranks=ranks, per_rank=job.stages_per_rank)
    each = sum(rank.of_mode(mode) for mode in rank.modes)
    ends = (rank.place == 0) + (rank.place == ranks - 1)
    messages = (2 * job.stages_per_rank - ends) * job.num_micro_batches * rank.stream
    blocks = len(rank.modes) if job.stages_per_rank > 1 else 1
    root = 0 if rank.is_whole else rank.c * (rank.outside + blocks * rank.block)
    stays = replace(_stays(rank), buffers=messages + rank.ahead, moment="backward")
    begun = min(held, job.num_micro_batches)
    for held, gradients in ((begun, 0), (min(begun, job.num_micro_batches - 1), FLOAT32 * rank.all)):
        kept = round(held * (each + job.stages_per_rank * rank.tables)) + rank.around + rank.stream
        stays = replace(stays, gathered=root + gradients, activations=kept)
        yield replace(stays, gathered=root + max(gradients, rank.down), working=rank.at_work(rank.modes[-1]))
        if rank.has_loss:
            yield replace(stays, loss=rank.loss, moment="loss")

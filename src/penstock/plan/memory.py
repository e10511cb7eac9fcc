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
from penstock.nn.chunks import chunk_tokens
from penstock.parallel.recompute_plan import Mode
from penstock.parallel.stages import blocks_of, under_way
from penstock.plan.activations import block_bytes, working_bytes
from penstock.plan.job import Job

_FLOAT32, _BFLOAT16 = 4, 2
_MIB = 2**20
_REDUCED_BEHIND = 2  # whole gradients that are being reduced while the next are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes per parameter that a rank keeps between steps, of what it holds of it, and needs to update it."""

    weights: float = 4.0
    gradients: float = 4.0
    optimizer: float = 8.0
    """Of matrices in the blocks."""
    optimizer_outside: float = 8.0
    """Of the embedding and the output matrix."""
    update: float = 0.0
    """Temporaries of the optimizer's step."""


ADAMW = Kept()


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
    rank = _Rank.of(job, kept, place)
    if job.layout.pipeline > 1:
        yield from rank.in_stages()
    else:
        yield from rank.in_place() if rank.is_whole else rank.in_turn()
    update = round(kept.update * rank.all / rank.cut)
    yield replace(rank.stays, gradients=rank.gradients, working=update, moment="update")


def _total(memory: Memory) -> int:
    return memory.total


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's share of a job; parameters are counted by its slice of each matrix, not by its shard."""

    job: Job
    kept: Kept
    modes: tuple[Mode, ...]
    """Of its blocks."""
    block: int
    """Parameters of a block."""
    first: int
    """Of the embedding, if it has it."""
    last: int
    """Of the output matrix, if it has it and it is not the embedding."""
    has_loss: bool
    place: int

    @classmethod
    def of(cls, job: Job, kept: Kept, place: int) -> "_Rank":
        layout, model = job.layout, job.model
        stages = layout.pipeline * job.stages_per_rank
        mine = [
            index
            for stage in range(place, stages, layout.pipeline)
            for index in blocks_of(stage, stages=stages, num_blocks=model.num_hidden_layers)
        ]
        matrix = model.vocab_size * model.hidden_size // layout.tensor
        is_last = place == layout.pipeline - 1
        return cls(
            job=job,
            kept=kept,
            modes=tuple(job.block_modes[index] for index in mine),
            block=job.block_parameters // layout.tensor,
            first=matrix if place == 0 else 0,
            last=matrix if is_last and (place > 0 or not model.tie_word_embeddings) else 0,
            has_loss=is_last,
            place=place,
        )

    @property
    def cut(self) -> int:
        """Ranks that each hold a part of a parameter's slice."""
        return self.job.shard_ranks

    @property
    def outside(self) -> int:
        return self.first + self.last

    @property
    def all(self) -> int:
        return self.in_blocks + self.outside

    @property
    def in_blocks(self) -> int:
        """With the last norm, which is counted to them."""
        layers = self.job.model.num_hidden_layers
        return self.job.in_blocks * len(self.modes) // layers // self.job.layout.tensor

    @property
    def is_whole(self) -> bool:
        """Whether parameters are used where they lie: there is nothing to gather, reduce or convert."""
        layout, exact = self.job.layout, self.c == self.kept.weights == _FLOAT32
        return self.cut == layout.replicate == 1 and exact

    @property
    def stays(self) -> Memory:
        """What is there at every moment."""
        optimizer = self.kept.optimizer * self.in_blocks
        optimizer += self.kept.optimizer_outside * self.outside
        weights = round(self.kept.weights * self.all / self.cut)
        return Memory(weights=weights, optimizer=round(optimizer / self.cut), feedback=self._feedback)

    @property
    def _feedback(self) -> int:
        """Of whole gradients, where they are cut; with copies, of the cut and a copy's part of it."""
        copies = self.job.layout.replicate
        if not self.job.feedback:
            return 0
        numbers = self.all if self.cut > 1 else 0
        numbers += self.all // self.cut * (copies + 1) // copies if copies > 1 else 0
        return _BFLOAT16 * numbers

    @property
    def gradients(self) -> int:
        return round(self.kept.gradients * self.all / self.cut)

    @property
    def c(self) -> int:
        return self.job.compute_bytes

    @property
    def stream(self) -> int:
        """Hidden states of a micro-batch between blocks, in bytes."""
        return self.c * self.job.rank_tokens * self.job.model.hidden_size // self.job.layout.tensor

    def of_mode(self, mode: Mode) -> int:
        """Bytes that a block keeps."""
        job = self.job
        return block_bytes(
            job.model,
            tokens=job.rank_tokens,
            compute_bytes=self.c,
            tensor=job.layout.tensor,
            context=job.layout.context,
            rule=job.context_rule,
            row=job.sequence_length,
        )[mode]

    def at_work(self, mode: Mode) -> int:
        """Bytes that a block's backward makes: what it kept not, and its temporaries."""
        job, again = self.job, self.of_mode("keep") - self.of_mode(mode)
        if mode != "keep":
            again += self.stream if mode == "full" else 0
        return max(0, again) + working_bytes(
            job.model,
            tokens=job.rank_tokens,
            compute_bytes=self.c,
            tensor=job.layout.tensor,
            context=job.layout.context,
        )

    @property
    def around(self) -> int:
        """What is kept outside the blocks: tables of positions, and the last norm."""
        job, model = self.job, self.job.model
        tables = 2 * self.c * job.rank_tokens * model.size_of_head
        if not self.has_loss:
            return tables
        norm = (2 * _FLOAT32 + self.c) * model.hidden_size * job.rank_tokens // job.layout.tensor
        return tables + norm

    @property
    def loss(self) -> int:
        """Logits of a chunk, the gradients of the output matrix and of the hidden states."""
        job, model = self.job, self.job.model
        rows, tokens = model.vocab_size // job.layout.tensor, job.rank_tokens
        at_once = min(tokens, chunk_tokens(rows))
        exact = self.c == _FLOAT32
        logits = at_once * rows * (_FLOAT32 if exact else _FLOAT32 + self.c)
        product = 0 if exact else self.c * rows * model.hidden_size
        hidden = self.c * tokens * model.hidden_size * (1 if job.layout.tensor == 1 else 2)
        return logits + product + _FLOAT32 * rows * model.hidden_size + hidden

    # how the parts of a step without stages come together

    def in_place(self) -> Iterator[Memory]:
        """Yield the moments of a rank that has all blocks, whole."""
        before = self.gradients if self.job.num_micro_batches > 1 else 0
        activations = [self.of_mode(mode) for mode in self.modes]
        kept = sum(activations) + self.around
        yield replace(self.stays, gradients=before, activations=kept, loss=self.loss, moment="loss")
        for index in {len(self.modes) - 1, 0}:
            done = self.block * (len(self.modes) - 1 - index) + (self.last or self.first)
            yield replace(
                self.stays,
                gradients=before or _FLOAT32 * done,
                gathered=self._down,
                activations=sum(activations[: index + 1]) + self._tables,
                working=self.at_work(self.modes[index]),
                moment="backward",
            )

    def in_turn(self) -> Iterator[Memory]:
        """Yield the moments of a rank that has all blocks."""
        unreduced = self._kept_gradients
        stay = self.job.num_micro_batches > 1 or (self.job.on_cpu and self._is_behind and self.cut > 1)
        before = self.gradients if stay else 0  # reductions behind hold the last step's until the next
        before = round(before * (1 - unreduced / (_FLOAT32 * self.all)))
        root, sharded = self.c * self.outside, self.cut > 1
        activations = [self.of_mode(mode) for mode in self.modes]
        stays = replace(self.stays, gradients=before, gathered=unreduced)
        reduced = round(self.kept.gradients * self.block / self.cut)
        yield replace(
            stays,
            gathered=unreduced + root + self._after_forward() + self._turned(self._after_forward()),
            activations=sum(activations) + self.around,
            loss=self.loss,
            buffers=(0 if self.job.overlapped else self._ahead) + self._behind(done=0),
            moment="loss",
        )
        for index in {max(0, len(self.modes) - back) for back in (1, 2, 3)} | {0}:
            done = len(self.modes) - 1 - index
            yield from self._of_backward(
                replace(stays, gradients=before or reduced * done), activations[: index + 1], root=root
            )
        reduction = _FLOAT32 * self.outside * (1 + 1 / self.cut if sharded else 1)
        reduction = max(reduction, self._behind(done=0) + _FLOAT32 * self.outside / self.cut)
        turned = self._turned(self._kept_parameters) if self.job.num_micro_batches > 1 else 0
        yield replace(
            stays,
            gradients=before or reduced * len(self.modes),
            gathered=unreduced + root + turned,
            buffers=round(reduction),
            moment="reduction",
        )

    def _of_backward(self, stays: Memory, activations: list[int], *, root: int) -> Iterator[Memory]:
        """Yield the moments of a block's backward: in its feed-forward, and when its gradients are reduced.

        Args:
            activations: of the blocks up to this one, which is the last.
        """
        index, sharded = len(activations) - 1, self.cut > 1
        done = len(self.modes) - len(activations)
        around = stays.gathered + root + self.c * (self.last or self.first)  # the output matrix's gradient
        are_there = self._after_forward() >= self.c * self.block * len(self.modes)
        ahead = self._ahead if index and not are_there else 0
        stays = replace(stays, moment="backward")
        yield replace(
            stays,
            gathered=around + max(self.c * self.block, self._after_forward()) + self._down,
            activations=sum(activations) + self._tables,
            working=self.at_work(self.modes[index]),
            buffers=ahead + self._behind(done=done),
        )
        yield replace(
            stays,
            gathered=around + self.c * self.block,
            activations=sum(activations[:-1]) + self._tables,
            working=self.stream,
            buffers=ahead
            + max(_FLOAT32 * self.block, self._behind(done=done + 1))
            + (_FLOAT32 * self.block // self.cut if sharded else 0),
        )

    @property
    def _down(self) -> int:
        """Of the feed-forward's last matrix: its gradient, the first of a block."""
        model = self.job.model
        return self.c * model.hidden_size * model.intermediate_size // self.job.layout.tensor

    @property
    def _tables(self) -> int:
        return 2 * self.c * self.job.rank_tokens * self.job.model.size_of_head

    def _after_forward(self) -> int:
        """Bytes of the blocks' parameters that stay between forward and backward."""
        whole, after = self.c * self.block * len(self.modes), self.job.reshard_after_forward
        stays = 0 if after is True else whole if after is False else whole // after
        return max(stays, self._kept_parameters)

    def _turned(self, there: int) -> int:
        """Bytes of the blocks that stay from one pass for the next, of those that are not there anyway."""
        if self.cut == 1 or not self.job.turning:
            return 0
        blocks = self.c * self.block
        return min(2 * blocks, self._ahead, max(0, blocks * len(self.modes) - there))

    @property
    def _kept_parameters(self) -> int:
        """Bytes of the blocks' parameters that stay gathered through a step."""
        if self.cut == 1:
            return 0
        return round(min(self.job.keep_mib * _MIB, self.c * self.block * len(self.modes)))

    @property
    def _kept_gradients(self) -> int:
        """Bytes of gradients that are summed whole, for which parameters leave room."""
        if self.cut == 1 or self.job.num_micro_batches == 1:
            return 0
        return round(min(self.job.keep_mib * _MIB - self._kept_parameters, _FLOAT32 * self.all))

    @property
    def _is_behind(self) -> bool:
        """Whether gradients are reduced beside computing: on CPUs only those that stay float32."""
        return self.job.overlapped and (not self.job.on_cpu or self.kept.gradients == _FLOAT32)

    def _behind(self, *, done: int) -> int:
        """Bytes of whole gradients being reduced when so many blocks have begun to in this micro-batch.

        Before the first of them, on CPUs, the root's of the last micro-batch is still under way.
        """
        if self.cut == 1:
            return 0
        block, root = _FLOAT32 * self.block, _FLOAT32 * self.outside
        if not self._is_behind:
            return block if done else 0
        asked = min(self.job.window_mib * _MIB, _FLOAT32 * self.all * self.job.num_micro_batches)
        window = max(_REDUCED_BEHIND * block, asked)
        if not self.job.on_cpu:
            return round(min(done * block, window))
        before = root if self.job.num_micro_batches > 1 and not self._kept_gradients else 0
        under_way = min(done, int(window // block)) * block
        under_way += before if root + under_way <= window or not done else 0
        earlier = _FLOAT32 * self.all * (self.job.num_micro_batches - 1)  # what a wide window leaves waiting
        return 2 * max(under_way, round(min(asked, earlier + done * block)))

    @property
    def _ahead(self) -> int:
        """Bytes of gathers under way."""
        if self.cut == 1:
            return 0
        blocks = self.c * self.block * (2 if self.job.overlapped else 1)
        asked = self.job.window_mib * _MIB
        return round(min(max(asked, self.c * self.block), self.c * self.all)) if asked else blocks

    def in_stages(self) -> Iterator[Memory]:
        """Yield the moments of a rank that has some of the blocks, and several micro-batches under way."""
        job, ranks = self.job, self.job.layout.pipeline
        held = under_way(self.place, ranks=ranks, per_rank=job.stages_per_rank)
        each = sum(self.of_mode(mode) for mode in self.modes)
        ends = (self.place == 0) + (self.place == ranks - 1)
        messages = (2 * job.stages_per_rank - ends) * job.num_micro_batches * self.stream
        blocks = len(self.modes) if job.stages_per_rank > 1 else 1
        root = 0 if self.is_whole else self.c * (self.outside + blocks * self.block)
        stays = replace(self.stays, buffers=messages + self._ahead, moment="backward")
        begun = min(held, job.num_micro_batches)
        for held, gradients in ((begun, 0), (min(begun, job.num_micro_batches - 1), _FLOAT32 * self.all)):
            kept = round(held * (each + job.stages_per_rank * self._tables)) + self.around + self.stream
            stays = replace(stays, gathered=root + gradients, activations=kept)
            yield replace(
                stays, gathered=root + max(gradients, self._down), working=self.at_work(self.modes[-1])
            )
            if self.has_loss:
                yield replace(stays, loss=self.loss, moment="loss")

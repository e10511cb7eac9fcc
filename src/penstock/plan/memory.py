"""Memory model: peak memory of one device in a training step, part by part; no torch.

Memory is computed at the moments at which it can be highest, and the maximum is the result:

    loss        all blocks have kept their activations; the logits of a chunk, the output matrix's gradient
    backward    in the block computed last, or the one before: its kept or recomputed activations, its
                gradients, its gathered parameters and the next ones, the buffers of the reduction before
    reduction   of the embedding and the output matrix, which come last and are the largest unit
    update      the optimizer's temporaries

Counted as eager mode on a CPU allocates, which `benchmarks/plan_memory.py` verifies, or as a GPU does, which
`make null-gpu` verifies: the allocator counted the same there as on an H200. Gaps of a caching
allocator, and the memory of libraries and contexts, are covered by the search's `headroom`. Shards are
rounded down; the batch itself is not counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from penstock.core.units import mib
from penstock.models.decoder.layer_kind import LayerKind
from penstock.nn.loss_chunks import chunk_tokens
from penstock.parallel.activation_checkpointing_plan import Mode
from penstock.parallel.layout import blocks_of, in_progress
from penstock.plan.activations import working_bytes
from penstock.plan.job import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank at one moment, by part."""

    weights: int = 0
    """Its shards, with float32 master copies if there are any."""
    optimizer: int = 0
    feedback: int = 0
    """Rounding errors of gradients on the wire (error feedback)."""
    gradients: int = 0
    """Reduced gradients."""
    gathered: int = 0
    """Whole parameters, and whole gradients that are not reduced yet."""
    activations: int = 0
    """Activations kept by blocks for the backward pass, and around the blocks."""
    working: int = 0
    """Recomputed activations of the present block and temporaries of its backward; those of the update."""
    loss: int = 0
    """Logits, gradients of the output matrix and of the hidden states."""
    buffers: int = 0
    """Buffers of collectives and messages in flight."""
    moment: str = ""
    """Name of the moment."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(_sizes_of(self))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return dict(zip(_PARTS, _sizes_of(self), strict=True))

    def lines(self) -> dict[str, str]:
        """Return each part and the total as text."""
        parts = {f"memory, {name}": mib(size) for name, size in self.parts.items()}
        return {**parts, f"memory, all, in the {self.moment}": mib(self.total)}


_PARTS = tuple(field.name for field in fields(Memory) if field.name != "moment")
_sizes_of = attrgetter(*_PARTS)  # fast: a search adds up the parts of many thousand plans


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Bytes per parameter held by a rank between steps, and needed for the update."""

    weights: float = 4.0
    gradients: float = 4.0
    optimizer: float = 8.0
    """Optimizer state of matrices in the blocks."""
    optimizer_outside: float = 8.0
    """Optimizer state of the embedding and the output matrix."""
    update: float = 0.0
    """Temporaries of the optimizer's step."""

    @property
    def state(self) -> float:
        """Bytes per parameter that the optimizer's step reads and writes, of matrices in the blocks."""
        return self.weights + self.gradients + self.optimizer


ADAMW = BytesPerParameter()


def peak(job: TrainingStep, kept: BytesPerParameter = ADAMW) -> Memory:
    """Return the moment of highest memory on the rank that needs most."""
    places = range(job.layout.pipeline)
    return max((moment for place in places for moment in moments(job, kept, place)), key=_total)


def moments(job: TrainingStep, kept: BytesPerParameter, place: int = 0) -> Iterator[Memory]:
    """Yield the moments of a step on the rank of a pipeline stage `place`."""
    rank = Rank.of(job, kept, place)
    if job.layout.pipeline > 1:
        yield from _in_stages(rank)
    else:
        yield from _in_place(rank) if rank.is_whole else _in_turn(rank)
    update = round(kept.update * rank.learned / rank.cut)
    yield replace(_stays(rank), gradients=rank.gradients, working=update, moment="update")


def _total(memory: Memory) -> int:
    return memory.total


@dataclass(frozen=True, slots=True)
class Rank:
    """Share of a job on one rank; parameters are those of its matrix slices, before FSDP shards them."""

    job: TrainingStep
    kept: BytesPerParameter
    layers: tuple[LayerKind, ...]
    """Kinds of its blocks."""
    modes: tuple[Mode, ...]
    """Modes of its blocks."""
    kept_by_mode: tuple[Mapping[Mode, int], ...]
    """Bytes that each of its blocks keeps for a micro-batch, by mode."""
    blocks: tuple[int, ...]
    """Parameters of each of its blocks."""
    in_blocks: int
    """Parameters in its blocks, the last norm included."""
    first: int
    """Parameters of the embedding, if it has it."""
    last: int
    """Parameters of the output matrix, if it has it and it is not tied to the embedding."""
    has_loss: bool
    place: int
    learned_blocks: tuple[int, ...]
    """Numbers of each block that it learns: the parameters, or those of its adapters."""
    learned_outside: int
    """Numbers outside of the blocks that it learns."""
    frozen: int
    """Bytes of its frozen weights."""

    @classmethod
    def of(cls, job: TrainingStep, kept: BytesPerParameter, place: int) -> "Rank":
        """Return the rank of a pipeline stage."""
        layout, model = job.layout, job.model
        stages = layout.pipeline * job.stages_per_rank
        mine = [
            index
            for stage in range(place, stages, layout.pipeline)
            for index in blocks_of(stage, stages=stages, num_blocks=model.num_hidden_layers)
        ]
        matrix = model.vocab_size * model.hidden_size // layout.tensor
        is_last = place == layout.pipeline - 1
        first = matrix if place == 0 else 0
        last = matrix if is_last and (place > 0 or not model.tie_word_embeddings) else 0
        layers = tuple(map(model.layers.__getitem__, mine))
        kinds, frozen = set(layers), 0
        kept_by_mode = {kind: job.kept_by_mode(kind) for kind in kinds}
        learned = {kind: job.learned_of_block(kind) for kind in kinds}
        blocks = {kind: job.in_blocks([kind]) // layout.tensor for kind in kinds}
        in_blocks, outside = job.in_blocks(layers) // layout.tensor, first + last
        if job.adapter is not None:
            outside = job.adapter.new_rows * model.hidden_size * (bool(first) + bool(last))
            outside += job.learned_of_output() * is_last
            outside += sum(
                matrix
                for name, here in (("embed", first), ("unembed", last))
                if here and name in job.adapter.saved
            )
            frozen = round(sum(count * job.frozen_bytes(kind) for kind, count in Counter(layers).items()))
            frozen += job.compute_bytes * (first + last)
            blocks = {kind: learned[kind] + (0 if job.whole_base else blocks[kind]) for kind in blocks}
            in_blocks = sum(blocks[kind] for kind in layers)
            first, last = (0, 0) if job.whole_base else (first, last)  # what is gathered
        return cls(
            job=job,
            kept=kept,
            layers=layers,
            modes=tuple(map(job.block_modes.__getitem__, mine)),
            kept_by_mode=tuple(kept_by_mode[kind] for kind in layers),
            blocks=tuple(blocks[kind] for kind in layers),
            in_blocks=in_blocks,
            first=first,
            last=last,
            has_loss=is_last,
            place=place,
            learned_blocks=tuple(learned[kind] for kind in layers),
            learned_outside=outside,
            frozen=frozen,
        )

    @property
    def learned(self) -> int:
        """Numbers that it learns, before FSDP shards them."""
        return self.learned_outside + self.learned_in_blocks

    @property
    def learned_in_blocks(self) -> int:
        """Those in its blocks."""
        return self.in_blocks if self.job.adapter is None else sum(self.learned_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of its largest block, gathered."""
        return self.c * max(self.blocks)

    @property
    def all_block_bytes(self) -> int:
        """Bytes of its blocks, gathered."""
        return self.c * sum(self.blocks)

    @property
    def cut(self) -> int:
        """Number of ranks that hold a part of each matrix slice."""
        return self.job.shard_ranks

    @property
    def outside(self) -> int:
        """Parameters outside of the blocks."""
        return self.first + self.last

    @property
    def all(self) -> int:
        """Parameters of all its slices."""
        return self.in_blocks + self.outside

    @property
    def last_of_kinds(self) -> set[int]:
        """Index of the last block with each set of parts: of such blocks, its backward needs most."""
        return set({kind.parts: index for index, kind in enumerate(self.layers)}.values())

    @property
    def is_whole(self) -> bool:
        """True if parameters are used in place: nothing to gather, reduce or convert."""
        layout, exact = self.job.layout, self.c == self.kept.weights == FLOAT32
        ranks = layout.replicate * layout.shard * layout.context
        return ranks == 1 and exact

    @property
    def feedback(self) -> int:
        """Bytes of error feedback: of whole gradients if sharded; with replicas, of shard and its part."""
        copies = self.job.layout.replicate
        if not self.job.feedback:
            return 0
        numbers = self.learned if self.cut > 1 else 0
        numbers += self.learned // self.cut * (copies + 1) // copies if copies > 1 else 0
        return _BFLOAT16 * numbers

    @property
    def gradients(self) -> int:
        """Bytes of reduced gradients that it keeps."""
        return round(self.kept.gradients * self.learned / self.cut)

    @property
    def c(self) -> int:
        """Bytes per number in the compute dtype."""
        return self.job.compute_bytes

    @property
    def stream(self) -> int:
        """Bytes of a micro-batch's hidden states between blocks."""
        return self.c * self.job.rank_tokens * self.job.model.hidden_size // self.job.layout.tensor

    @property
    def kept_bytes(self) -> list[int]:
        """Bytes that each block keeps for a micro-batch, in its mode."""
        return [by_mode[mode] for by_mode, mode in zip(self.kept_by_mode, self.modes, strict=True)]

    @property
    def activations(self) -> list[int]:
        """Bytes that each block keeps for all micro-batches of a pass."""
        return [self.job.batches_per_pass * kept for kept in self.kept_bytes]

    @property
    def other_streams(self) -> int:
        """Bytes of the hidden-state gradients of a pass's other micro-batches, while a block works on one."""
        return (self.job.batches_per_pass - 1) * self.stream

    def at_work(self, index: int) -> int:
        """Bytes that a block's backward allocates: recomputed activations and temporaries."""
        job, mode, kept = self.job, self.modes[index], self.kept_by_mode[index]
        again = kept["keep"] - kept[mode]
        if mode != "keep":
            again += self.stream if mode == "full" else 0
        return max(0, again) + working_bytes(
            job.model,
            self.layers[index],
            tokens=job.rank_tokens,
            compute_bytes=self.c,
            tensor=job.layout.tensor,
            context=job.layout.context,
            rule=job.context_rule,
            row=job.sequence_length,
            lacks_log_sums=job.lacks_log_sums,
        )

    @property
    def around(self) -> int:
        """Bytes kept outside the blocks: tables of positions, and the last norm."""
        job, model = self.job, self.job.model
        if not self.has_loss:
            return self.tables
        normed = 2 * FLOAT32 if job.norms_in_float32 else self.c
        norm = (normed + self.c) * model.hidden_size * self.pass_tokens // job.layout.tensor
        return self.tables + norm

    @property
    def loss(self) -> int:
        """Bytes of a chunk's logits and the gradients of the output matrix and the hidden states."""
        job, model = self.job, self.job.model
        rows, tokens = model.vocab_size // job.layout.tensor, self.pass_tokens
        is_fused = not job.on_cpu and job.layout.tensor == 1
        chunk = job.loss_tokens or chunk_tokens(rows, on_cpu=job.on_cpu, is_fused=is_fused)
        at_once, exact = min(tokens, chunk), self.c == FLOAT32
        logits = at_once * rows * (FLOAT32 if exact else FLOAT32 + self.c)
        if is_fused:  # logits and their gradient, as computed; other losses have a quarter of the tokens
            logits = at_once * rows * 2 * self.c
        if model.final_logit_softcapping is not None:  # uncapped logits, and the derivative of the cap
            logits += 2 * self.c * at_once * rows
        product = 0 if exact or not job.on_cpu else self.c * rows * model.hidden_size
        gradient = FLOAT32 * rows * model.hidden_size
        if job.adapter is not None and job.adapter.new_rows:
            product += self.c * rows * model.hidden_size  # frozen and new rows, joined
        elif job.adapter is not None and not job.learns_output:  # the output matrix is frozen
            product, gradient = 0, FLOAT32 * job.learned_of_output()
            if job.adapter.unembed:  # a second product
                logits += self.c * at_once * rows
            if job.adapter.unembed and job.adapter.has_magnitudes:  # times factors, from lengths of float32
                logits += 2 * self.c * at_once * rows
                product = 0 if exact else FLOAT32 * rows * model.hidden_size
        hidden = self.c * tokens * model.hidden_size * (1 if job.layout.tensor == 1 else 2)
        return logits + product + gradient + hidden

    def down(self, index: int) -> int:
        """Bytes of the gradient of a block's last matrix, the first one that is computed."""
        if self.job.adapter is not None:
            return 0
        *_, (outputs, inputs) = self.job.model.linear_shapes(self.layers[index]).values()
        return self.c * outputs * inputs // self.job.layout.tensor

    @property
    def output_gradient(self) -> int:
        """Bytes of the output matrix's gradient, from the loss on."""
        if not self.job.learns_output:
            return 0
        matrix = self.job.model.vocab_size * self.job.model.hidden_size // self.job.layout.tensor
        return self.c * (self.last or self.first or matrix * self.has_loss)

    @property
    def tables(self) -> int:
        """Bytes of the cosines and sines of positions."""
        return 2 * self.c * self.pass_tokens * self.job.model.size_of_head

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass that it computes."""
        return self.job.batches_per_pass * self.job.rank_tokens

    @property
    def casts(self) -> bool:
        """True if blocks cast their own parameters, because no rank shares parameters with this one."""
        layout = self.job.layout
        replicas = 1 if self.job.outer_every else layout.replicate  # islands share none between outer steps
        alone = replicas * layout.shard * layout.context * layout.pipeline == 1
        return alone and self.job.adapter is None and self.kept.weights == FLOAT32 > self.c

    def after_forward(self) -> int:
        """Bytes of the blocks' parameters that stay between forward and backward."""
        if self.casts:  # a block that is recomputed casts again, unless it is compiled
            plain = self.job.on_cpu or self.job.kernels != "compiled"
            modes = zip(self.blocks, self.modes, strict=True)
            cast = sum(block for block, mode in modes if not (plain and mode != "keep"))
            has_codes = not plain and self.job.linear == "float8_tensorwise"
            return (1 if has_codes else self.c) * cast
        whole, after = self.all_block_bytes, self.job.reshard_after_forward
        stays = 0 if after is True else whole if after is False else whole // after
        return max(stays, self.kept_parameters)

    def turned(self, there: int) -> int:
        """Bytes of the blocks that stay from one pass to the next, beyond those already present."""
        if self.cut == 1 or not self.job.turning:
            return 0
        return min(2 * self.block_bytes, self.ahead, max(0, self.all_block_bytes - there))

    @property
    def kept_parameters(self) -> int:
        """Bytes of the blocks' parameters that stay gathered through a step."""
        if self.cut == 1:
            return 0
        return round(min(self.job.keep_mib * _MIB, self.all_block_bytes))

    @property
    def kept_gradients(self) -> int:
        """Bytes of gradients accumulated unreduced, in the room that parameters leave."""
        if self.cut == 1 or self.job.num_passes == 1:
            return 0
        return round(min(self.job.keep_mib * _MIB - self.kept_parameters, FLOAT32 * self.learned))

    @property
    def is_behind(self) -> bool:
        """True if gradients are reduced beside computing: on CPUs only those in float32."""
        return self.job.overlapped and (not self.job.on_cpu or self.kept.gradients == FLOAT32)

    def behind(self, *, done: int) -> int:
        """Return the bytes of unreduced gradients in flight after `done` reductions of this micro-batch.

        Before the first, on CPUs, those of the root unit of the last micro-batch are still in flight.
        """
        if self.cut == 1:
            return 0
        block, root = FLOAT32 * max(self.learned_blocks), FLOAT32 * self.learned_outside
        if not self.is_behind:
            return block if done else 0
        window_bytes = min(self.job.window_mib * _MIB, FLOAT32 * self.learned * self.job.num_passes)
        window = max(_REDUCED_BEHIND * block, window_bytes)
        if not self.job.on_cpu:
            return round(min(done * block, window))
        before = root if self.job.num_passes > 1 and not self.kept_gradients else 0
        in_progress = min(done, int(window // block)) * block
        in_progress += before if root + in_progress <= window or not done else 0
        earlier = FLOAT32 * self.learned * (self.job.num_passes - 1)  # still waiting with a wide window
        return 2 * max(in_progress, round(min(window_bytes, earlier + done * block)))

    @property
    def ahead(self) -> int:
        """Bytes of gathers in flight."""
        if self.cut == 1:
            return 0
        blocks = self.block_bytes * (2 if self.job.overlapped else 1)
        window_bytes = self.job.window_mib * _MIB
        return round(min(max(window_bytes, self.block_bytes), self.c * self.all)) if window_bytes else blocks


def _stays(rank: Rank) -> Memory:
    """Return the memory present at every moment."""
    optimizer = rank.kept.optimizer * rank.learned_in_blocks
    optimizer += rank.kept.optimizer_outside * rank.learned_outside
    weights = round((rank.kept.weights * rank.learned + rank.frozen) / rank.cut)
    return Memory(weights=weights, optimizer=round(optimizer / rank.cut), feedback=rank.feedback)


def _in_place(rank: Rank) -> Iterator[Memory]:
    """Yield the moments of a rank that has all blocks, unsharded."""
    before, activations = rank.gradients if rank.job.num_passes > 1 else 0, rank.activations
    kept = sum(activations) + rank.around
    yield replace(_stays(rank), gradients=before, activations=kept, loss=rank.loss, moment="loss")
    for index in rank.last_of_kinds | {0}:
        done = sum(rank.learned_blocks[index + 1 :])
        outside = (rank.last or rank.first) if rank.job.adapter is None else rank.learned_outside
        done += min(outside, rank.learned_outside)
        yield replace(
            _stays(rank),
            gradients=before or FLOAT32 * done,
            gathered=rank.down(index),
            activations=sum(activations[: index + 1]) + rank.tables,
            working=rank.at_work(index) + rank.other_streams,
            moment="backward",
        )


def _in_turn(rank: Rank) -> Iterator[Memory]:
    """Yield the moments of a rank that has all blocks, sharded."""
    unreduced = rank.kept_gradients
    stay = rank.job.num_passes > 1 or (rank.job.on_cpu and rank.is_behind and rank.cut > 1)
    before = rank.gradients if stay else 0  # pending reductions hold the last step's until the next
    before = round(before * (1 - unreduced / (FLOAT32 * rank.learned)))
    root, sharded, activations = rank.c * rank.outside, rank.cut > 1, rank.activations
    stays = replace(_stays(rank), gradients=before, gathered=unreduced)
    reduced = [round(rank.kept.gradients * learned / rank.cut) for learned in rank.learned_blocks]
    yield replace(
        stays,
        gathered=unreduced + root + rank.after_forward() + rank.turned(rank.after_forward()),
        activations=sum(activations) + rank.around,
        loss=rank.loss,
        buffers=(0 if rank.job.overlapped else rank.ahead) + rank.behind(done=0),
        moment="loss",
    )
    for index in {max(0, len(rank.modes) - back) for back in (2, 3)} | rank.last_of_kinds | {0}:
        gradients = before or sum(reduced[index + 1 :])
        yield from _of_backward(
            rank, replace(stays, gradients=gradients), activations[: index + 1], root=root
        )
    reduction = FLOAT32 * rank.learned_outside * (1 + 1 / rank.cut if sharded else 1)
    reduction = max(reduction, rank.behind(done=0) + FLOAT32 * rank.learned_outside / rank.cut)
    turned = rank.turned(rank.kept_parameters) if rank.job.num_passes > 1 else 0
    yield replace(
        stays,
        gradients=before or sum(reduced),
        gathered=unreduced + root + turned,
        buffers=round(reduction),
        moment="reduction",
    )


def _of_backward(rank: Rank, stays: Memory, activations: list[int], *, root: int) -> Iterator[Memory]:
    """Yield the moments of a block's backward: in its feed-forward, and when its gradients are reduced.

    Args:
        activations: those of the blocks up to this one, the last of the list.
    """
    index, sharded = len(activations) - 1, rank.cut > 1
    done = len(rank.modes) - len(activations)
    around = stays.gathered + root + rank.output_gradient
    around += max(rank.c * rank.blocks[index], rank.after_forward())
    are_there = rank.after_forward() >= rank.all_block_bytes
    ahead = rank.ahead if index and not are_there else 0
    stays = replace(stays, moment="backward")
    yield replace(
        stays,
        gathered=around + rank.down(index),
        activations=sum(activations) + rank.tables,
        working=rank.at_work(index) + rank.other_streams,
        buffers=ahead + rank.behind(done=done),
    )
    yield replace(
        stays,
        gathered=around,
        activations=sum(activations[:-1]) + rank.tables,
        working=rank.stream + rank.other_streams,
        buffers=ahead
        + max(FLOAT32 * rank.learned_blocks[index], rank.behind(done=done + 1))
        + (FLOAT32 * rank.learned_blocks[index] // rank.cut if sharded else 0),
    )


def _in_stages(rank: Rank) -> Iterator[Memory]:
    """Yield the moments of a pipeline rank with some of the blocks and several micro-batches in flight."""
    job, ranks = rank.job, rank.job.layout.pipeline
    held = in_progress(rank.place, ranks=ranks, per_rank=job.stages_per_rank)
    each = sum(rank.kept_bytes)
    ends = (rank.place == 0) + (rank.place == ranks - 1)
    messages = (2 * job.stages_per_rank - ends) * job.num_micro_batches * rank.stream
    blocks = rank.all_block_bytes if job.stages_per_rank > 1 else rank.block_bytes
    root = 0 if rank.is_whole else rank.c * rank.outside + blocks
    stays = replace(_stays(rank), buffers=messages + rank.ahead, moment="backward")
    begun = min(held, job.num_micro_batches)
    for held, gradients in ((begun, 0), (min(begun, job.num_micro_batches - 1), FLOAT32 * rank.learned)):
        kept = round(held * (each + job.stages_per_rank * rank.tables)) + rank.around + rank.stream
        stays = replace(stays, gathered=root + gradients, activations=kept)
        yield replace(stays, gathered=root + max(gradients, rank.down(-1)), working=rank.at_work(-1))
        if rank.has_loss:
            yield replace(stays, loss=rank.loss, moment="loss")


FLOAT32, _BFLOAT16 = 4, 2
_MIB = 2**20
_REDUCED_BEHIND = 2  # whole gradients being reduced while the next are computed

"""What one rank of a job holds, and what its step makes room for, tensor by tensor, in bytes; no torch.

When these are there together is in memory.py. Shares of what ranks hold are rounded down.
"""

from dataclasses import dataclass

from penstock.nn.chunks import chunk_tokens
from penstock.parallel.recompute_plan import Mode
from penstock.parallel.stages import blocks_of
from penstock.plan.activations import working_bytes
from penstock.plan.job import Job

FLOAT32, _BFLOAT16 = 4, 2
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


@dataclass(frozen=True, slots=True)
class Rank:
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
    def of(cls, job: Job, kept: Kept, place: int) -> "Rank":
        """Return the rank at a place of the pipeline."""
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
        """Parameters that are in no block."""
        return self.first + self.last

    @property
    def all(self) -> int:
        """Parameters of its slices."""
        return self.in_blocks + self.outside

    @property
    def in_blocks(self) -> int:
        """With the last norm, which is counted to them."""
        layers = self.job.model.num_hidden_layers
        return self.job.in_blocks * len(self.modes) // layers // self.job.layout.tensor

    @property
    def is_whole(self) -> bool:
        """Whether parameters are used where they lie: there is nothing to gather, reduce or convert."""
        layout, exact = self.job.layout, self.c == self.kept.weights == FLOAT32
        return self.cut == layout.replicate == 1 and exact

    @property
    def feedback(self) -> int:
        """Of whole gradients, where they are cut; with copies, of the cut and a copy's part of it."""
        copies = self.job.layout.replicate
        if not self.job.feedback:
            return 0
        numbers = self.all if self.cut > 1 else 0
        numbers += self.all // self.cut * (copies + 1) // copies if copies > 1 else 0
        return _BFLOAT16 * numbers

    @property
    def gradients(self) -> int:
        """Reduced gradients that it keeps."""
        return round(self.kept.gradients * self.all / self.cut)

    @property
    def c(self) -> int:
        """Bytes of a number as it is computed."""
        return self.job.compute_bytes

    @property
    def stream(self) -> int:
        """Hidden states of a micro-batch between blocks, in bytes."""
        return self.c * self.job.rank_tokens * self.job.model.hidden_size // self.job.layout.tensor

    def of_mode(self, mode: Mode) -> int:
        """Bytes that a block keeps."""
        return self.job.kept_by_mode[mode]

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
        norm = (2 * FLOAT32 + self.c) * model.hidden_size * job.rank_tokens // job.layout.tensor
        return tables + norm

    @property
    def loss(self) -> int:
        """Logits of a chunk, the gradients of the output matrix and of the hidden states."""
        job, model = self.job, self.job.model
        rows, tokens = model.vocab_size // job.layout.tensor, job.rank_tokens
        at_once = min(tokens, chunk_tokens(rows))
        exact = self.c == FLOAT32
        logits = at_once * rows * (FLOAT32 if exact else FLOAT32 + self.c)
        product = 0 if exact else self.c * rows * model.hidden_size
        hidden = self.c * tokens * model.hidden_size * (1 if job.layout.tensor == 1 else 2)
        return logits + product + FLOAT32 * rows * model.hidden_size + hidden

    @property
    def down(self) -> int:
        """Of the feed-forward's last matrix: its gradient, the first of a block."""
        model = self.job.model
        return self.c * model.hidden_size * model.intermediate_size // self.job.layout.tensor

    @property
    def tables(self) -> int:
        """Cosines and sines of positions."""
        return 2 * self.c * self.job.rank_tokens * self.job.model.size_of_head

    def after_forward(self) -> int:
        """Bytes of the blocks' parameters that stay between forward and backward."""
        whole, after = self.c * self.block * len(self.modes), self.job.reshard_after_forward
        stays = 0 if after is True else whole if after is False else whole // after
        return max(stays, self.kept_parameters)

    def turned(self, there: int) -> int:
        """Bytes of the blocks that stay from one pass for the next, of those that are not there anyway."""
        if self.cut == 1 or not self.job.turning:
            return 0
        blocks = self.c * self.block
        return min(2 * blocks, self.ahead, max(0, blocks * len(self.modes) - there))

    @property
    def kept_parameters(self) -> int:
        """Bytes of the blocks' parameters that stay gathered through a step."""
        if self.cut == 1:
            return 0
        return round(min(self.job.keep_mib * _MIB, self.c * self.block * len(self.modes)))

    @property
    def kept_gradients(self) -> int:
        """Bytes of gradients that are summed whole, for which parameters leave room."""
        if self.cut == 1 or self.job.num_micro_batches == 1:
            return 0
        return round(min(self.job.keep_mib * _MIB - self.kept_parameters, FLOAT32 * self.all))

    @property
    def is_behind(self) -> bool:
        """Whether gradients are reduced beside computing: on CPUs only those that stay float32."""
        return self.job.overlapped and (not self.job.on_cpu or self.kept.gradients == FLOAT32)

    def behind(self, *, done: int) -> int:
        """Bytes of whole gradients being reduced when so many blocks have begun to in this micro-batch.

        Before the first of them, on CPUs, the root's of the last micro-batch is still under way.
        """
        if self.cut == 1:
            return 0
        block, root = FLOAT32 * self.block, FLOAT32 * self.outside
        if not self.is_behind:
            return block if done else 0
        asked = min(self.job.window_mib * _MIB, FLOAT32 * self.all * self.job.num_micro_batches)
        window = max(_REDUCED_BEHIND * block, asked)
        if not self.job.on_cpu:
            return round(min(done * block, window))
        before = root if self.job.num_micro_batches > 1 and not self.kept_gradients else 0
        under_way = min(done, int(window // block)) * block
        under_way += before if root + under_way <= window or not done else 0
        earlier = FLOAT32 * self.all * (self.job.num_micro_batches - 1)  # what a wide window leaves waiting
        return 2 * max(under_way, round(min(asked, earlier + done * block)))

    @property
    def ahead(self) -> int:
        """Bytes of gathers under way."""
        if self.cut == 1:
            return 0
        blocks = self.c * self.block * (2 if self.job.overlapped else 1)
        asked = self.job.window_mib * _MIB
        return round(min(max(asked, self.c * self.block), self.c * self.all)) if asked else blocks

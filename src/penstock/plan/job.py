"""What is trained and how its work is shared: all that a prediction depends on but the machines; no torch."""

import math
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.models.llama.config import LlamaConfig
from penstock.parallel.encoded_size import BLOCK, CodecName, encoded_bytes
from penstock.parallel.layout import ContextRule, Layout
from penstock.parallel.recompute_plan import Mode
from penstock.plan.activations import block_bytes

Compute = Literal["bfloat16", "float32"]
Linear = Literal["compute", "float8_tensorwise", "float8_rowwise", "mxfp8"]
Gather = Literal["compute", "bfloat16", "int8", "float8"]
Reduce = Literal["float32", "bfloat16", "int8", "float8"]
Kernels = Literal["eager", "fused", "compiled"]
Attention = Literal["flash", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training step, as every rank repeats it."""

    model: LlamaConfig
    layout: Layout
    sequence_length: int
    micro_batch_size: int = 1
    """Rows of one forward pass, of all ranks that share them."""
    num_micro_batches: int = 1
    """Forward passes of a step."""
    modes: Mode | tuple[Mode, ...] = "keep"
    """What every block, or each block, keeps of its activations."""
    stages_per_rank: int = 1
    """Of the pipeline."""
    stages_balanced: bool = False
    """A pipeline's last stage has fewer blocks for its output matrix, as in other trainers. Penstock deals
    blocks evenly, so that the last stage is the slowest."""
    context_rule: ContextRule = "all_gather"
    """As in ParallelConfig."""
    context_balanced: bool = False
    """Every rank of a row attends over as many pairs, as in other trainers. Penstock's last rank sees all."""
    reshard_after_forward: bool | int = True
    """As in ParallelConfig."""
    window_mib: float = 0.0
    """Bytes of gathers under way; 0: two blocks. inf: no limit, which fragments the allocator on GPUs."""
    keep_mib: float = 0.0
    """Gathered parameters and unreduced gradients kept through a step's micro-batches; inf: all."""
    operations: int = 0
    """Pieces that gloo cuts a collective into, each through one NIC; 0: one a NIC. NCCL uses all of them."""
    gather: Gather = "compute"
    reduce: Reduce = "float32"
    feedback: bool = False
    """What `reduce` rounds away is kept for the next reduction."""
    compute: Compute = "bfloat16"
    linear: Linear = "compute"
    kernels: Kernels = "compiled"
    """What computes between products. eager: operator by operator; fused: with one kernel a norm and a
    rotation; compiled: what torch.compile makes of a block."""
    attention: Attention = "flash"
    """plain: the scores of all pairs of tokens are written to memory, as with T5's biases."""
    overlapped: bool = True
    """Gathers and reductions run beside computing. false: as stock FSDP2 on CPUs."""
    on_cpu: bool = False
    """Of what is reduced beside computing, a copy lies where it is received."""
    turning: bool = False
    """The blocks at the end of a pass stay for the next one, as many as the window has room for, and what is
    outside of blocks all the time, as Penstock does it where `overlapped`; other trainers do not."""
    tensor_overlapped: bool = False
    """Tensor-parallel collectives run piece by piece beside the products (asynchronous TP). Penstock's own
    wait; this is for what other trainers measured."""
    state_bytes: float = 16.0
    """Of weight, gradient and optimizer state per parameter: what the update reads and writes once."""
    outer_every: int = 0
    """Steps between synchronisations of the copies of `layout.replicate` (DiLoCo); 0: every step's gradients
    are reduced."""
    outer_bits: Literal[4, 8, 32] = 32
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: none."""
    data_tokens_per_s: float = math.inf
    """What the loader serves a rank's share of the batch with."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "micro_batch_size", "num_micro_batches", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a job must be 1 or more", got=getattr(self, name))
        blocks = self.model.num_hidden_layers
        if not isinstance(self.modes, str) and len(self.modes) != blocks:
            raise ConfigError(f"A job needs one mode for each of {blocks} blocks", got=len(self.modes))
        if self.layout.pipeline * self.stages_per_rank > blocks:
            raise ConfigError(
                f"{blocks} blocks cannot make {self.layout.pipeline} x {self.stages_per_rank} stages",
                got=self.layout.pipeline,
                fix="Lower the pipeline degree.",
            )

    @property
    def block_modes(self) -> tuple[Mode, ...]:
        """The mode of each block."""
        return (self.modes,) * self.model.num_hidden_layers if isinstance(self.modes, str) else self.modes

    @property
    def kept_by_mode(self) -> dict[Mode, int]:
        """Bytes that one block keeps on a rank for a micro-batch, in each mode."""
        return block_bytes(
            self.model,
            tokens=self.rank_tokens,
            compute_bytes=self.compute_bytes,
            tensor=self.layout.tensor,
            context=self.layout.context,
            rule=self.context_rule,
            row=self.sequence_length,
        )

    @property
    def rows_tokens(self) -> int:
        """Tokens of a micro-batch, of all ranks that share them."""
        return self.micro_batch_size * self.sequence_length

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-batch that one rank computes, its matrices cut over `tensor` or not."""
        return self.rows_tokens // self.layout.context

    @property
    def step_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.rows_tokens * self.num_micro_batches * self.layout.num_data

    @property
    def compute_bytes(self) -> int:
        """Of an activation."""
        return 2 if self.compute == "bfloat16" else 4

    @property
    def gather_bytes(self) -> float:
        """Of a gathered parameter on the wire."""
        return float(self.compute_bytes) if self.gather == "compute" else _on_the_wire(self.gather)

    @property
    def reduce_bytes(self) -> float:
        """Of a reduced gradient on the wire."""
        return _on_the_wire(self.reduce)

    @property
    def shard_ranks(self) -> int:
        """Ranks over which each parameter is cut by FSDP."""
        return self.layout.shard * self.layout.context

    @property
    def block_parameters(self) -> int:
        """Of one block, whole."""
        return self.in_blocks // self.model.num_hidden_layers

    @property
    def in_blocks(self) -> int:
        """Parameters of all blocks, whole."""
        return self.model.num_parameters - self.outside

    @property
    def outside(self) -> int:
        """Parameters of the embedding and the output matrix."""
        return self.model.vocab_size * self.model.hidden_size * (1 if self.model.tie_word_embeddings else 2)

    @property
    def outer_bytes(self) -> float:
        """Of a parameter when copies are synchronised, on the wire."""
        codecs: dict[int, CodecName] = {4: "int4", 8: "int8", 32: "float32"}
        return _on_the_wire(codecs[self.outer_bits])


def _on_the_wire(codec: CodecName) -> float:
    """Return bytes a number, with its share of a scale."""
    return encoded_bytes(BLOCK, codec) / BLOCK

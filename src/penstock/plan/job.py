"""Training step to predict: model, layout and settings, without the machines; no torch."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.layer_kind import LayerKind
from penstock.nn.linear.adapter_config import GROUP, OUTPUT_MATRIX, AdapterConfig
from penstock.parallel.activation_checkpointing_plan import Mode
from penstock.parallel.config import Schedule
from penstock.parallel.ethernet.wire_size import BLOCK, CodecName, encoded_bytes
from penstock.parallel.layout import ContextRule, RankLayout
from penstock.plan.activations import adapter_bytes, block_bytes

Compute = Literal["bfloat16", "float32"]
Linear = Literal["compute", "float8_tensorwise", "float8_rowwise", "mxfp8"]
Gather = Literal["compute", "bfloat16", "int8", "float8"]
Reduce = Literal["float32", "bfloat16", "int8", "float8"]
Kernels = Literal["eager", "fused", "compiled"]
Attention = Literal["flash", "flash3", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """Training step with all settings that affect its time or memory."""

    model: DecoderConfig
    layout: RankLayout
    sequence_length: int
    micro_batch_size: int = 1
    """Rows of one forward pass, over all ranks that share them."""
    num_micro_batches: int = 1
    """Forward passes of a step."""
    modes: Mode | tuple[Mode, ...] = "keep"
    """Activation checkpointing of every block, or of each block."""
    stages_per_rank: int = 1
    """Virtual pipeline stages per rank."""
    stages_balanced: bool = False
    """True if a pipeline's last stage has fewer blocks because of its output matrix, as in other trainers.
    Penstock distributes blocks evenly, so its last stage is the slowest."""
    context_rule: ContextRule = "all_gather"
    """As in ParallelConfig."""
    context_balanced: bool = False
    """True if context parallelism balances attention over ranks, as in other trainers. In Penstock the last
    rank has the most pairs."""
    reshard_after_forward: bool | int = True
    """As in ParallelConfig."""
    window_mib: float = 0.0
    """Limit of gathers in flight; 0: two blocks. inf: no limit, which fragments the allocator on GPUs."""
    keep_mib: float = 0.0
    """Gathered parameters and unreduced gradients kept through a step's micro-batches; inf: all."""
    schedule: Schedule = "depth_first"
    """As in EthernetConfig."""
    operations: int = 0
    """Pieces that gloo cuts a collective into, each through one NIC; 0: one per NIC. NCCL uses all of
    them."""
    gather: Gather = "compute"
    reduce: Reduce = "float32"
    feedback: bool = False
    """True if the rounding error of `reduce` is added to the next reduction (error feedback)."""
    compute: Compute = "bfloat16"
    linear: Linear = "compute"
    kernels: Kernels = "compiled"
    """Operators between products. eager: one by one; fused: with one kernel per norm and per rotation;
    compiled: by torch.compile."""
    attention: Attention = "flash"
    """flash: FlashAttention 2. flash3: kernels for Hopper and Blackwell (FlashAttention 3, cuDNN).
    plain: the scores of all token pairs are written to memory, as with T5's biases."""
    loss_tokens: int = 0
    """Tokens in a chunk of the loss, for measurements of other trainers; 0: as nn/loss_chunks.py chooses."""
    overlapped: bool = True
    """True if gathers and reductions run beside computing; False: as in stock FSDP2 on CPUs."""
    on_cpu: bool = False
    """True on CPUs, where gradients reduced beside computing are copied to receive buffers."""
    turning: bool = False
    """True if blocks at the end of a pass stay gathered for the next one, as many as fit the window, and the
    unit outside of the blocks always, as in Penstock with `overlapped`; not in other trainers."""
    messages_overlapped: bool = False
    """True if a pipeline's messages travel beside computing, for measurements of other trainers. Penstock's
    ranks wait for them."""
    tensor_overlapped: bool = False
    """True if tensor-parallel collectives run piece by piece beside the products (asynchronous TP), for
    measurements of other trainers. Penstock's ranks wait for them."""
    state_bytes: float = 16.0
    """Bytes of weight, gradient and optimizer state per parameter: read and written once per update."""
    adapter: AdapterConfig | None = None
    """The adapter that is trained on frozen weights; None: all weights are trained."""
    whole_base: bool = False
    """With an adapter: True if each rank holds all frozen weights of its stages and slices, so that nothing
    is gathered, and what is learned is averaged over the ranks that share rows; False: they are sharded."""
    outer_every: int = 0
    """Steps between synchronisations of the replicas of `layout.replicate` (DiLoCo); 0: every step's
    gradients are reduced."""
    outer_bits: Literal[4, 8, 32] = 32
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: none."""
    data_tokens_per_s: float = math.inf
    """Speed of the loader for a rank's share of the batch."""

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
        """Mode of each block."""
        return (self.modes,) * self.model.num_hidden_layers if isinstance(self.modes, str) else self.modes

    def kept_by_mode(self, kind: LayerKind) -> dict[Mode, int]:
        """Return the bytes that a block keeps on a rank for a micro-batch, by mode."""
        is_compiled = self.kernels == "compiled" and not self.on_cpu
        kept = block_bytes(
            self.model,
            kind,
            tokens=self.rank_tokens,
            compute_bytes=self.compute_bytes,
            tensor=self.layout.tensor,
            context=self.layout.context,
            rule=self.context_rule,
            row=self.sequence_length,
            norms_in_float32=self.norms_in_float32,
            is_compiled=is_compiled,
            has_codes=is_compiled and self.linear == "float8_tensorwise",
            lacks_log_sums=self.lacks_log_sums,
        )
        if self.adapter is not None:
            kept["keep"] += round(
                self.rank_tokens
                * adapter_bytes(
                    self.model,
                    kind,
                    self.adapter,
                    compute_bytes=self.compute_bytes,
                    tensor=self.layout.tensor,
                    norms_in_float32=self.norms_in_float32,
                )
            )
        return kept

    @property
    def rows_tokens(self) -> int:
        """Tokens of a micro-batch, over all ranks that share its rows."""
        return self.micro_batch_size * self.sequence_length

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-batch that one rank computes; tensor parallelism does not divide them."""
        return self.rows_tokens // self.layout.context

    @property
    def num_passes(self) -> int:
        """Passes through the blocks and back per step; each gathers parameters and reduces gradients."""
        return 1 if self.schedule == "breadth_first" else self.num_micro_batches

    @property
    def batches_per_pass(self) -> int:
        """Micro-batches that a block computes before the next block."""
        return self.num_micro_batches // self.num_passes

    @property
    def step_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.rows_tokens * self.num_micro_batches * self.layout.num_data

    @property
    def compute_bytes(self) -> int:
        """Bytes per activation."""
        return 2 if self.compute == "bfloat16" else 4

    @property
    def norms_in_float32(self) -> bool:
        """True if norms convert to float32 and keep that: on CPUs, and in other trainers under autocast."""
        return self.on_cpu or self.kernels == "fused"

    @property
    def lacks_log_sums(self) -> bool:
        """True if no attention kernel returns log-sums: in float32, those of GPUs do not."""
        return not self.on_cpu and self.compute == "float32"

    @property
    def gather_bytes(self) -> float:
        """Bytes per gathered parameter on the wire."""
        return float(self.compute_bytes) if self.gather == "compute" else _on_the_wire(self.gather)

    @property
    def reduce_bytes(self) -> float:
        """Bytes per reduced gradient on the wire."""
        return _on_the_wire(self.reduce)

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that FSDP shards each parameter over."""
        return 1 if self.whole_base else self.layout.shard * self.layout.context

    def in_blocks(self, layers: Sequence[LayerKind]) -> int:
        """Return the parameters of some blocks, unsharded; the last norm is counted in equal parts in all."""
        last_norm = len(layers) * self.model.hidden_size // self.model.num_hidden_layers
        return self.model.parameters_of(layers) + last_norm

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block, unsharded."""
        return max(self.in_blocks([kind]) for kind in set(self.model.layers))

    @property
    def outside(self) -> int:
        """Parameters of the embedding and the output matrix."""
        return self.model.vocab_size * self.model.hidden_size * (1 if self.model.tie_word_embeddings else 2)

    def learned_of_block(self, kind: LayerKind) -> int:
        """Return the numbers of a block that a rank learns, before FSDP shards them."""
        tensor = self.layout.tensor
        if self.adapter is None:
            return self.in_blocks([kind]) // tensor
        numbers = 0
        for name, (outputs, inputs) in self._adapted(kind, self.adapter):
            by_inputs = name in ("output", "down")  # the matrix with a side that is not cut is on every rank
            outputs, inputs = (outputs, inputs // tensor) if by_inputs else (outputs // tensor, inputs)
            numbers += self.adapter.num_parameters(outputs, inputs)
        return numbers + self.saved(in_blocks=True) // self.model.num_hidden_layers

    def _adapted(self, kind: LayerKind, adapter: AdapterConfig) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield name, outputs and inputs of the adapted layers of a block."""
        for path, shape in self.model.linear_shapes(kind).items():
            if (name := path.rpartition(".")[2]) in adapter.layers:
                yield name, shape

    def summed_of_block(self, kind: LayerKind) -> int:
        """Return the numbers of a block's adapters that every tensor-parallel rank holds whole.

        Each sees part of the work, so their gradients are summed in every backward pass.
        """
        if self.adapter is None or self.layout.tensor == 1:
            return 0
        numbers = 0
        for name, (outputs, inputs) in self._adapted(kind, self.adapter):
            by_inputs = name in ("output", "down")
            numbers += self.adapter.rank * (outputs if by_inputs else inputs)
            numbers += outputs * (by_inputs and self.adapter.has_magnitudes)
        return numbers

    def learned_outside(self) -> float:
        """Return the numbers outside of the blocks that a rank learns, before FSDP shards them.

        In a pipeline those of the output matrix.
        """
        is_pipeline = self.layout.pipeline > 1
        if self.adapter is None:
            matrix = self.model.vocab_size * self.model.hidden_size if is_pipeline else self.outside
            return matrix / self.layout.tensor
        matrices = 1 if is_pipeline or self.model.tie_word_embeddings else 2
        rows = min(self.adapter.new_rows, self.model.vocab_size // self.layout.tensor)  # of the last slice
        new = rows * self.model.hidden_size * matrices
        return float(new + self.learned_of_output() + self.saved(in_blocks=False))

    def saved(self, *, in_blocks: bool) -> int:
        """Return the numbers of a tensor-parallel rank that are trained whole, next to an adapter."""
        if self.adapter is None or not self.adapter.saved:
            return 0
        shapes = self.model.parameter_shapes.items()
        return sum(
            math.prod(shape) // (self.layout.tensor if len(shape) > 1 else 1)
            for name, shape in shapes
            if self.adapter.trains(name) and name.startswith("layers.") == in_blocks
        )

    @property
    def learns_output(self) -> bool:
        """True if the whole output matrix is learned."""
        matrix = "embed" if self.model.tie_word_embeddings else OUTPUT_MATRIX
        return self.adapter is None or matrix in self.adapter.saved

    def learned_of_output(self) -> int:
        """Return the numbers of the output matrix's adapter on the rank with the loss, before FSDP shards."""
        if self.adapter is None or not self.adapter.unembed:
            return 0
        rows = self.model.vocab_size // self.layout.tensor
        return self.adapter.num_parameters(rows, self.model.hidden_size)

    @property
    def learned_of_rank(self) -> float:
        """Numbers that a rank updates, on average over pipeline stages."""
        layout = self.layout
        if self.adapter is None:
            return self.model.num_parameters / layout.tensor / layout.pipeline / self.shard_ranks
        kinds = Counter(self.model.layers).items()
        in_blocks = sum(count * self.learned_of_block(kind) for kind, count in kinds) / layout.pipeline
        return (in_blocks + self.learned_outside()) / self.shard_ranks

    def frozen_bytes(self, kind: LayerKind) -> float:
        """Return the bytes of a block's frozen weights on a rank, before FSDP shards them."""
        if self.adapter is None:
            return 0.0
        rounded = {"compute": 0.0, "int8": 1.0, "int4": 0.5 + 2 / GROUP}[self.adapter.base]
        matrices = sum(math.prod(shape) for _, shape in self._adapted(kind, self.adapter))
        other = self.in_blocks([kind]) - (matrices if rounded else 0)
        return (self.compute_bytes * other + rounded * matrices * bool(rounded)) / self.layout.tensor

    @property
    def outer_bytes(self) -> float:
        """Bytes per parameter on the wire when replicas are synchronised."""
        codecs: dict[int, CodecName] = {4: "int4", 8: "int8", 32: "float32"}
        return _on_the_wire(codecs[self.outer_bits])


def _on_the_wire(codec: CodecName) -> float:
    """Return bytes per number, with its share of a scale."""
    return encoded_bytes(BLOCK, codec) / BLOCK

"""What takes memory on one rank of a run, in bytes, before it runs; imports no torch."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from penstock.core.units import mib
from penstock.nn.chunks import chunk_tokens
from penstock.parallel.layout import Layout
from penstock.parallel.recompute_plan import Mode, plan
from penstock.parallel.stages import blocks_of, under_way
from penstock.train.activations import block_bytes
from penstock.train.changes import plan as planned_changes
from penstock.train.config import TrainConfig
from penstock.train.optim.config import optimizer_bytes_per_parameter
from penstock.train.precision import gradient_bytes_per_parameter, weight_bytes_per_parameter

_FLOAT32 = 4
_GATHERED_BLOCKS = 2  # the one at work and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one rank; the first three stay, the others are there during a step."""

    weights: int
    """Its shards, with float32 copies where there are any."""
    gradients: int
    optimizer: int
    gathered: int
    """Whole parameters at work: embedding, output matrix and two blocks, and their gradients; in a pipeline
    those of all its blocks, until the last micro-batch is through."""
    activations: int
    """What blocks keep for their backward."""
    recomputed: int
    """What one block that is computed again keeps meanwhile."""
    loss: int
    """The logits of a chunk, the output matrix's gradient in float32, the hidden states and theirs."""

    @property
    def total(self) -> int:
        """Sum, with the larger of `loss` and `recomputed`: when blocks are computed again, logits are gone.

        What libraries, the allocator's gaps and batches take is not in it.
        """
        stays = self.weights + self.gradients + self.optimizer + self.gathered + self.activations
        return stays + max(self.loss, self.recomputed)

    def lines(self) -> dict[str, str]:
        """Return each part and the total for a person."""
        parts = {field.name: mib(getattr(self, field.name)) for field in fields(self)}
        return {**{f"memory, {name}": size for name, size in parts.items()}, "memory, all": mib(self.total)}


def memory_plan(config: TrainConfig, layout: Layout) -> MemoryPlan:
    """Work out the memory of the rank that needs most, at the largest micro-batch of the recipe.

    Raises:
        ConfigError: the recipe's recompute.budget is too small.
    """
    places = (_of_place(config, layout, place) for place in range(layout.pipeline))
    return max(places, key=lambda plan: plan.total)


def _of_place(config: TrainConfig, layout: Layout, place: int) -> MemoryPlan:
    """Return the memory of a rank at a place of the pipeline."""
    weights, tokens = config.precision.weights, micro_batch_tokens(config, layout)
    mine = _parameters(config, layout, place)
    kept, modes = _kept(config, layout), recompute_modes(config, layout)
    modes = [modes[index] for index in mine.blocks]
    cut = layout.world_size // (layout.replicate * layout.pipeline)
    state = mine.in_blocks * optimizer_bytes_per_parameter(config.optim)
    state += mine.outside * optimizer_bytes_per_parameter(config.optim, in_blocks=False)
    held = under_way(place, ranks=layout.pipeline, per_rank=config.parallel.stages_per_rank)
    return MemoryPlan(
        weights=mine.all * weight_bytes_per_parameter(weights) // cut,
        gradients=mine.all * gradient_bytes_per_parameter(weights) // cut,
        optimizer=round(state / cut),
        gathered=_gathered_bytes(config, layout, mine) // layout.tensor,
        activations=round(held * sum(kept[mode] for mode in modes)),
        recomputed=kept["keep"] if set(modes) != {"keep"} else 0,
        loss=_loss_bytes(config, layout, tokens=tokens) if place == layout.pipeline - 1 else 0,
    )


class _Parameters(NamedTuple):
    """Parameters of a place of the pipeline, those of all ranks that share them."""

    blocks: list[int]
    """Which blocks of the model."""
    in_blocks: int
    outside: int
    """In the embedding and the output matrix."""

    @property
    def all(self) -> int:
        return self.in_blocks + self.outside


def _parameters(config: TrainConfig, layout: Layout, place: int) -> _Parameters:
    model, stages = config.model, layout.pipeline * config.parallel.stages_per_rank
    matrix = model.vocab_size * model.hidden_size
    is_reused = model.tie_word_embeddings and layout.pipeline == 1  # else the last stage has its own copy
    ends = (place == 0) + (place == layout.pipeline - 1 and not is_reused)
    blocks = [
        index
        for stage in range(place, stages, layout.pipeline)
        for index in blocks_of(stage, stages=stages, num_blocks=model.num_hidden_layers)
    ]
    in_blocks = model.num_parameters - matrix * (1 if model.tie_word_embeddings else 2)
    return _Parameters(blocks, in_blocks * len(blocks) // model.num_hidden_layers, ends * matrix)


def _gathered_bytes(config: TrainConfig, layout: Layout, mine: _Parameters) -> int:
    compute, block = _compute_bytes(config), mine.in_blocks // len(mine.blocks)
    if layout.pipeline > 1:  # its gradients are summed whole, in float32
        return (compute + _FLOAT32) * mine.all
    blocks = min(_GATHERED_BLOCKS, len(mine.blocks)) * block
    if config.parallel.reshard_after_forward is False:
        blocks = mine.in_blocks
    return compute * (2 * mine.outside + blocks + block)


def recompute_modes(config: TrainConfig, layout: Layout) -> list[Mode]:
    """Return what each block does with its activations.

    Raises:
        ConfigError: the recipe's recompute.budget is too small.
    """
    kept = _kept(config, layout)
    return plan(config.recompute, num_blocks=config.model.num_hidden_layers, kept=kept)


def micro_batch_tokens(config: TrainConfig, layout: Layout) -> int:
    """Return the tokens of a rank's largest micro-batch, over all planned changes."""
    data = config.data
    size, micro, length = data.global_batch_size, data.micro_batch_size, data.sequence_length
    largest = (micro or size // layout.num_data) * length
    for change in planned_changes(data):
        entry = change.entry
        size, micro = entry.global_batch_size or size, entry.micro_batch_size or micro
        length = entry.sequence_length or length
        largest = max(largest, (micro or size // layout.num_data) * length)
    return largest // layout.context


def _kept(config: TrainConfig, layout: Layout) -> dict[Mode, int]:
    tokens = micro_batch_tokens(config, layout)
    return block_bytes(
        config.model, tokens=tokens, compute_bytes=_compute_bytes(config), tensor=layout.tensor
    )


def _loss_bytes(config: TrainConfig, layout: Layout, *, tokens: int) -> int:
    model, compute = config.model, _compute_bytes(config)
    rows = model.vocab_size // layout.tensor
    at_once = min(tokens, chunk_tokens(rows))
    logits = at_once * rows * (_FLOAT32 if compute == _FLOAT32 else _FLOAT32 + compute)
    return logits + _FLOAT32 * rows * model.hidden_size + 2 * compute * tokens * model.hidden_size


def _compute_bytes(config: TrainConfig) -> int:
    return 2 if config.compute == "bfloat16" else _FLOAT32

"""Model shard of one rank: weights ready for inference, adapters, KV cache and runner.

All ranks open their shard here, in one order; a single process is the only rank of one. Layers are replaced
in this order: slices of plain layers are fused and merged, row-parallel layers get their all-reduce, and the
linear layer inside is packed. Adapters wrap that layer, on CPUs only when modules first compute a step
(lora.py), and are measured on it once the ranks have met.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch

from penstock.checkpoint.peft import read_settings
from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.log import EventLog
from penstock.devices import accelerator
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.batch_invariance import check_batch_invariant, fix_rows
from penstock.engine.model_runner.collectives import RankGroup
from penstock.engine.model_runner.kv_cache import PagedCache, type_of_pages
from penstock.engine.model_runner.lora import Adapters
from penstock.engine.model_runner.open import identity_of_model, open_config, open_model
from penstock.engine.model_runner.runner import Runner
from penstock.engine.model_runner.serving_layers import chosen, convert, fuse, prepare
from penstock.engine.model_runner.tensor_parallel import join_ranks
from penstock.engine.scheduling.groups import CacheGroup, cache_groups, rows_of
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import ALONE, TensorParallelRank
from penstock.nn.linear.quantized import Float8Linear, Int4Linear, Int8Linear

log = EventLog(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """A rank's model with its adapters and formats."""

    model: Decoder
    """This rank's shard; `config` has the shard's sizes, but the whole vocabulary."""
    adapters: Adapters
    device: torch.device
    dtype: torch.dtype
    """Dtype of activations."""
    pages_dtype: torch.dtype
    """Dtype of keys and values: that of activations, or int8."""
    group: RankGroup | None
    """Tensor-parallel group; None: one rank."""
    groups: tuple[CacheGroup, ...]
    """Cache groups of its layers, for the engine's context."""
    has_head: bool = True
    """False if the folder stores no output matrix: the model has hidden states, and no logits."""
    batch_invariant: bool = False
    """True: single tokens are attended as prompts are."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Operation -> name of its kernel; those that are missing: the first of each."""

    def with_kernels(self, kernels: Mapping[str, str]) -> Self:
        """Return the shard with other kernels; its layers use them from now on."""
        for module in self.model.modules():
            if isinstance(module, Int8Linear | Int4Linear | Float8Linear):
                module.use(kernels)
        return replace(self, kernels=kernels)

    def runner(self, *, num_blocks: int, block_size: int) -> Runner:
        """Measure the adapters, allocate the KV cache, return the runner; the ranks have joined by then."""
        self.adapters.measure()
        config = self.model.config
        cache = PagedCache(
            rows_of(self.groups),
            num_blocks=num_blocks + 1,  # one that no sequence has, for padding rows of compiled steps
            block_size=block_size,
            kv_heads=config.key_value_heads,
            head_dim=config.size_of_head,
            dtype=self.pages_dtype,
            device=self.device,
            has_singles=not self.batch_invariant,
            kernels=self.kernels,
            groups=[group.layers for group in self.groups],
        )
        return Runner(self.model, cache, self.adapters, group=self.group)

    def close(self) -> None:
        """Leave the tensor-parallel group. Idempotent."""
        if self.group is not None:
            self.group.close()


def open_part(
    path: Path, config: EngineConfig, *, place: TensorParallelRank = ALONE
) -> tuple[ModelShard, Path | None]:
    """Load a rank's shard of a model folder; return it and the folder's tokenizer.json or None.

    Raises:
        UsageError, ModelError, CheckpointError: as in `open_model`, and for adapters.
    """
    device = device_of(config.device, place)
    if place.ranks > 1 and device.type == "cpu":
        torch.set_num_threads(env.num_threads(place.ranks))
    whole = open_config(path, step=config.checkpoint, ignored_keys=config.ignored_keys)
    for folder in config.adapters.values():
        read_settings(Path(folder))  # fails early: loading the model takes long
    model, tokenizer_path = open_model(
        path,
        step=config.checkpoint,
        place=place,
        ignored_keys=config.ignored_keys,
        may_lack_head=True,
    )
    identity = identity_of_model(path, step=config.checkpoint, ignored_keys=config.ignored_keys)
    part = part_of(model.to(device), config, whole=whole, place=place, device=device, base_hash=identity)
    return part, tokenizer_path


def part_of(
    model: Decoder,
    config: EngineConfig,
    *,
    whole: DecoderConfig,
    place: TensorParallelRank,
    device: torch.device,
    base_hash: str = "",
) -> ModelShard:
    """Prepare a rank's model for inference, in place; it must be on its device.

    Args:
        whole: config of the unsharded model.
        base_hash: identity of its weights, for adapters; "": unknown.

    Raises:
        ModelError: an adapter does not fit this model.
        ConfigError: the device does not support the weights' format.
    """
    check_batch_invariant(config, whole, device)
    has_head = model.config.tie_word_embeddings or model.unembed is not None
    model.limit_texts(min(config.max_context or model.longest_text, model.longest_text))
    floats, matrices = chosen(config.weights, model.norm.weight)
    convert(model, floats)
    dtype = model.norm.weight.dtype
    pages_dtype = type_of_pages(config.cache, dtype=dtype, head_dim=whole.size_of_head)
    fuse(model)
    group = None if place.ranks == 1 else RankGroup(place, device)
    if group is not None:
        join_ranks(model, whole, group)
    adapters = Adapters(model, whole, group=group, base_hash=base_hash)
    for name, folder in config.adapters.items():
        adapters.add(name, Path(folder))
    prepare(model, matrices, config.activations)
    if config.batch_invariant and device.type != "cpu":
        fix_rows(model)
    if config.weights == "auto":
        log.info(
            "weights_chosen",
            "Chose {weights} weights and {activations} activations for this device",
            weights=matrices,
            activations=str(dtype).removeprefix("torch."),
        )
    return ModelShard(
        model=model,
        adapters=adapters,
        device=device,
        dtype=dtype,
        pages_dtype=pages_dtype,
        group=group,
        groups=cache_groups(whole.windows, context=min(config.max_context or whole.context, whole.context)),
        has_head=has_head,
        batch_invariant=config.batch_invariant,
    )


def device_of(asked: str | None, place: TensorParallelRank) -> torch.device:
    """Return the device of a rank; raise ConfigError if the one that was asked for is not there."""
    try:
        device = torch.device(asked) if asked else accelerator.choose()
    except RuntimeError:
        device = None
    if device is None or device.type not in accelerator.KINDS:
        kinds = " or ".join(dict.fromkeys((accelerator.CPU.type, accelerator.choose().type)))
        raise ConfigError("No such device", got=asked, fix=f"Choose {kinds}, or leave it out.")
    if accelerator.is_accelerator(device) and accelerator.choose().type != device.type:
        fix = "Leave it out to compute on the CPU, or install a torch build for this machine's GPU."
        raise ConfigError("torch finds no GPU here", got=asked, fix=fix)
    is_alone = place.ranks == 1 or not accelerator.is_accelerator(device)
    return device if is_alone else torch.device(device.type, place.rank)

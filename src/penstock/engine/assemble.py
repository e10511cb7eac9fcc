"""From a folder to a live engine, in one visible order."""

from pathlib import Path

import torch

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.engine.adapters import Adapters
from penstock.engine.blocks import BlockPool
from penstock.engine.capacity import SHARE_OF_FREE, Capacity, num_blocks_for, step_tokens
from penstock.engine.config import EngineConfig
from penstock.engine.drafts.opening import Source, build_drafting, bytes_of_block, open_source
from penstock.engine.drawer import Drawer
from penstock.engine.engine import Engine
from penstock.engine.fuse import fuse
from penstock.engine.kv_cache import PagedCache, bytes_per_block
from penstock.engine.open import open_model
from penstock.engine.runner import Runner
from penstock.engine.sampler import Sampler
from penstock.engine.scheduler import Limits, Scheduler
from penstock.engine.weights import convert, prepare
from penstock.engine.words import Words
from penstock.models.llama.config import LlamaConfig


def build_engine(path: Path, config: EngineConfig) -> Engine:
    """Open a Hugging Face folder, a run or a checkpoint as an engine.

    Raises:
        UsageError, ModelError, CheckpointError: as in `open_model`, of the model or of an adapter.
        ConfigError: the cache has no room for one context, or the device no such weights.
    """
    device = _device(config.device)
    model, tokenizer_path = open_model(path)
    words = None if tokenizer_path is None else Words.load(tokenizer_path)
    model = model.to(device)
    convert(model, config.weights)
    fuse(model)
    adapters = Adapters(model, model.config)
    for name, folder in config.adapters.items():
        adapters.add(name, folder)
    prepare(model, config.weights)
    dtype = model.norm.weight.dtype
    source = open_source(config, model.config, tokenizer_path, dtype=dtype, device=device)
    capacity = _capacity(model.config, config, source, device=device, dtype=dtype)
    cache = PagedCache(
        model.config.num_hidden_layers,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        kv_heads=model.config.key_value_heads,
        head_dim=model.config.size_of_head,
        dtype=dtype,
        device=device,
    )
    scheduler = Scheduler(
        Limits(
            max_sequences=capacity.max_sequences,
            tokens_per_step=capacity.tokens_per_step,
            block_size=capacity.block_size,
        ),
        BlockPool(capacity.num_blocks, keep_idle=config.prefix_caching),
    )
    return Engine(
        Runner(model, cache, adapters),
        scheduler,
        capacity=capacity,
        drawer=Drawer(Sampler()),
        words=words,
        drafting=build_drafting(config, source, capacity),
    )


def _device(asked: str | None) -> torch.device:
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


def _capacity(
    model: LlamaConfig, config: EngineConfig, source: Source, *, device: torch.device, dtype: torch.dtype
) -> Capacity:
    longest = model.max_position_embeddings
    if config.max_context is not None and config.max_context > longest:
        raise ConfigError(
            f"max_context is beyond the model's context of {longest:,} tokens", got=config.max_context
        )
    context = config.max_context or longest
    block_bytes = bytes_per_block(
        model.num_hidden_layers,
        block_size=config.block_size,
        kv_heads=model.key_value_heads,
        head_dim=model.size_of_head,
        dtype=dtype,
    )
    return Capacity(
        context=context,
        vocab_size=model.vocab_size,
        num_blocks=num_blocks_for(
            _cache_bytes(config, device),
            block_bytes=block_bytes + bytes_of_block(source, block_size=config.block_size),
            block_size=config.block_size,
            context=context,
            max_sequences=config.max_sequences,
        ),
        block_size=config.block_size,
        tokens_per_step=step_tokens(
            device.type,
            asked=config.tokens_per_step,
            max_sequences=config.max_sequences,
            num_drafts=0 if config.drafts == "off" else config.num_drafts,
        ),
        max_sequences=config.max_sequences,
    )


def _cache_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.cache_gib is not None:
        return int(config.cache_gib * 2**30)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else env.available_bytes()
    return int(free * SHARE_OF_FREE[device.type])

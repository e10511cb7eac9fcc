"""From a folder to a live engine, in one visible order."""

from pathlib import Path

import torch

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.engine.capacity import PIECE_TOKENS, SHARE_OF_FREE, Capacity, num_blocks_for, step_tokens
from penstock.engine.compiled import is_wanted
from penstock.engine.config import EngineConfig
from penstock.engine.drafts.opening import Source, build_drafting, bytes_of_block, open_source
from penstock.engine.drawing.drawer import Drawer
from penstock.engine.drawing.sampler import Sampler
from penstock.engine.engine import Engine
from penstock.engine.grammars import Grammars
from penstock.engine.kv_cache import bytes_per_block
from penstock.engine.part import Part, open_part
from penstock.engine.ranks.processes import RankProcesses
from penstock.engine.ranks.runner import RankedRunner, start_others
from penstock.engine.runner import Runs
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.scheduler import Limits, Scheduler
from penstock.engine.scheduling.step_size import StepSize
from penstock.engine.trial import activation_bytes
from penstock.engine.words import Words
from penstock.models.llama.model import Llama
from penstock.models.llama.slices import Place


def build_engine(path: Path, config: EngineConfig) -> Engine:
    """Open a Hugging Face folder, a run or a checkpoint as an engine.

    Raises:
        UsageError, ModelError, CheckpointError: as in `open_model`, of the model or of an adapter.
        ConfigError: the cache has no room for one context, or the device no such weights.
    """
    others = None if config.tensor_parallel == 1 else start_others(path, config)
    try:
        return _assemble(path, config, others)
    except BaseException:
        if others is not None:
            others.close()
        raise


def _assemble(path: Path, config: EngineConfig, others: RankProcesses | None) -> Engine:
    part, tokenizer_path = open_part(path, config, place=Place(0, config.tensor_parallel))
    words = (
        None if tokenizer_path is None else Words.load(tokenizer_path, trust_contents=config.trust_contents)
    )
    source = open_source(config, part.model.config, tokenizer_path, dtype=part.dtype, device=part.device)
    if others is not None:
        others.answered()  # before free memory is measured, which they share
    capacity = _capacity(part, config, source)
    runner = _runner(part, capacity, config, others)
    scheduler = Scheduler(
        Limits(
            max_sequences=capacity.max_sequences,
            tokens_per_step=capacity.tokens_per_step,
            block_size=capacity.block_size,
            window=_window(part, source),
        ),
        BlockPool(capacity.num_blocks, keep_idle=config.prefix_caching),
        size=StepSize(
            between_s=config.between_tokens_ms / 1e3,
            piece=PIECE_TOKENS[part.device.type],
            most=capacity.tokens_per_step,
        ),
    )
    grammars = _grammars(words, capacity)
    return Engine(
        runner,
        scheduler,
        capacity=capacity,
        drawer=Drawer(Sampler(grammars)),
        words=words,
        drafting=build_drafting(config, source, capacity),
        grammars=grammars,
    )


def _runner(part: Part, capacity: Capacity, config: EngineConfig, others: RankProcesses | None) -> Runs:
    pages = {"num_blocks": capacity.num_blocks, "block_size": capacity.block_size}
    compiles = is_wanted(config.compile, device=part.device, ranks=config.tensor_parallel)
    if others is not None:
        return RankedRunner.join(part, others, **pages)
    runner = part.runner(**pages)
    if compiles:
        width = -(-capacity.context // capacity.block_size)
        runner.compile(
            max_sequences=capacity.max_sequences,
            max_tokens=min(capacity.tokens_per_step, PIECE_TOKENS[part.device.type]),
            max_blocks=width,
        )
    return runner


def _window(part: Part, source: Source) -> int | None:
    """Return how much any layer sees of what lies in the blocks; None: all of it."""
    models = [part.model, source] if isinstance(source, Llama) else [part.model]
    windows = [window for model in models for window in model.config.windows]
    known = [window for window in windows if window is not None]
    return max(known) if len(known) == len(windows) else None


def _grammars(words: Words | None, capacity: Capacity) -> Grammars | None:
    if words is None:
        return None
    # some folders name end tokens that nothing ever draws
    known = min(capacity.vocab_size, words.tokenizer.vocab_size)
    ends = [end for end in words.stop_ids if end < known]
    return Grammars(words.tokenizer, vocab_size=capacity.vocab_size, end_ids=ends)


def _capacity(part: Part, config: EngineConfig, source: Source) -> Capacity:
    model, device = part.model.config, part.device
    longest = model.context
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
        dtype=part.pages_dtype,
    )
    tokens_per_step = step_tokens(
        device.type,
        asked=config.tokens_per_step,
        max_sequences=config.max_sequences,
        num_drafts=0 if config.drafts == "off" else config.num_drafts,
    )
    if config.cache_gib is not None or device.type == "cpu":
        block_bytes *= config.tensor_parallel  # all ranks' pages are in the memory that is counted
    return Capacity(
        context=context,
        vocab_size=model.vocab_size,
        num_blocks=num_blocks_for(
            _cache_bytes(part, config, tokens_per_step=tokens_per_step),
            block_bytes=block_bytes + bytes_of_block(source, config),
            block_size=config.block_size,
            context=context,
            max_sequences=config.max_sequences,
        ),
        block_size=config.block_size,
        tokens_per_step=tokens_per_step,
        max_sequences=config.max_sequences,
    )


def _cache_bytes(part: Part, config: EngineConfig, *, tokens_per_step: int) -> int:
    if config.cache_gib is not None:
        return int(config.cache_gib * 2**30)
    if part.device.type == "cpu":
        return int(env.available_bytes() * SHARE_OF_FREE["cpu"])
    taken = 0
    if config.tensor_parallel == 1:
        taken = activation_bytes(
            part,
            tokens_per_step=tokens_per_step,
            max_sequences=config.max_sequences,
            block_size=config.block_size,
        )
    return int(torch.cuda.mem_get_info(part.device)[0] * SHARE_OF_FREE["cuda"]) - taken

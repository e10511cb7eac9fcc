"""Build an engine from a model folder or a model in memory: weights, KV cache, scheduler, sampler."""

from functools import partial
from pathlib import Path

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.devices import accelerator
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.kernels import choose_kernels
from penstock.engine.model_runner.capacity import Capacity, defaults_of, num_blocks_for, step_tokens
from penstock.engine.model_runner.compiled_steps import is_wanted, program_sizes
from penstock.engine.model_runner.decode_graphs import are_wanted
from penstock.engine.model_runner.interface import StepRunner
from penstock.engine.model_runner.kv_cache import bytes_per_block
from penstock.engine.sampling.grammars_of_adapters import GrammarsOfAdapters
from penstock.engine.sampling.output_processor import OutputProcessor
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.budget import StepSize
from penstock.engine.scheduling.groups import blocks_of, rows_of
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits
from penstock.engine.speculation.open import build_drafting, open_speculator
from penstock.engine.text_processor import TextProcessor
from penstock.engine.workers.model_shard import ModelShard, open_part, part_of
from penstock.engine.workers.processes import RankProcesses
from penstock.engine.workers.ranked_runner import RankedRunner, start_others
from penstock.engine.workers.warmup import activation_bytes, compile_draws, graph_bytes
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import ALONE, TensorParallelRank


def build_engine(path: Path, config: EngineConfig) -> Engine:
    """Open a Hugging Face folder, a run or a checkpoint as an engine.

    Raises:
        UsageError, ModelError, CheckpointError: as in `open_model`, of the model or of an adapter.
        ConfigError: the cache has no room for one context, or the device does not support such weights.
    """
    others = None if config.tensor_parallel == 1 else start_others(path, config)
    try:
        return _assemble(path, config, others)
    except BaseException:  # Ctrl-C too must leave no process behind
        if others is not None:
            others.close()
        raise


def _assemble(path: Path, config: EngineConfig, others: RankProcesses | None) -> Engine:
    part, tokenizer_path = open_part(path, config, place=TensorParallelRank(0, config.tensor_parallel))
    return _engine(part, config, tokenizer_path, others)


def engine_of(model: Decoder, config: EngineConfig, *, tokenizer_path: Path | None = None) -> Engine:
    """Build an engine from a model in memory, on the model's device.

    The model is changed in place: its matrices are merged, packed or rounded.

    Args:
        tokenizer_path: a tokenizer.json, with a chat template beside it or not; None: token ids only.

    Raises:
        ModelError: an adapter does not fit this model.
        ConfigError: as in `build_engine`, or `config.tensor_parallel` is above 1.
    """
    if config.tensor_parallel > 1:
        raise ConfigError(
            "A model in memory can be served by one process only",
            got=f"tensor_parallel={config.tensor_parallel}",
            fix="Write the model to a folder, and open that with build_engine.",
        )
    device = model.norm.weight.device
    part = part_of(model, config, whole=model.config, place=ALONE, device=device)
    return _engine(part, config, tokenizer_path, None)


def _engine(
    part: ModelShard, config: EngineConfig, tokenizer_path: Path | None, others: RankProcesses | None
) -> Engine:
    text_processor = (
        None
        if tokenizer_path is None
        else TextProcessor.load(tokenizer_path, trust_contents=config.trust_contents)
    )
    if text_processor is not None:
        for name, folder in config.adapters.items():
            text_processor.add_adapter(name, Path(folder))
    speculator = open_speculator(config, part.model.config, dtype=part.dtype, device=part.device)
    if others is not None:
        others.answered()  # before free memory is measured: the ranks share it
    kernels = choose_kernels(part, config)
    part = part.with_kernels(kernels.chosen)
    capacity = _capacity(part, config)
    runner = _runner(part, capacity, config, others)
    scheduler = Scheduler(
        StepLimits(
            max_sequences=capacity.max_sequences,
            tokens_per_step=capacity.tokens_per_step,
            block_size=capacity.block_size,
            windows=tuple(group.window for group in part.groups),
        ),
        BlockPool(capacity.num_blocks, keep_idle=config.prefix_caching),
        size=StepSize(
            target_s=config.target_itl_ms / 1e3,
            chunk_tokens=defaults_of(part.device.type).piece_tokens,
            most=capacity.tokens_per_step,
        ),
    )
    grammars = _grammars(text_processor, runner, capacity)
    return Engine(
        runner,
        scheduler,
        capacity=capacity,
        token_sampler=OutputProcessor(Sampler(grammars)),
        text_processor=text_processor,
        drafting=build_drafting(config, speculator),
        grammars=grammars,
        has_head=part.has_head,
        kernels=kernels,
    )


def _runner(
    part: ModelShard, capacity: Capacity, config: EngineConfig, others: RankProcesses | None
) -> StepRunner:
    pages = {"num_blocks": capacity.num_blocks, "block_size": capacity.block_size}
    records = are_wanted(config.compile, device=part.device, ranks=config.tensor_parallel)
    is_alone = not config.batch_invariant and not config.adapters  # programs serve neither
    compiles = is_wanted(
        config.compile,
        has_graphs=records and is_alone,
        device=part.device,
        ranks=config.tensor_parallel,
    )
    if others is not None:
        return RankedRunner.join(part, others, **pages)
    runner = part.runner(**pages)
    if accelerator.is_accelerator(part.device):  # a CPU has computed a step when it returns
        runner.sample(capacity.max_sequences)
        compile_draws(part)
    if compiles and records:  # before the first request: graphs are of compiled programs
        runner.compile([1], has_any=True).compile_all()
    elif compiles:
        chunk = min(capacity.tokens_per_step, defaults_of(part.device.type).piece_tokens)
        runner.compile(program_sizes(max_sequences=capacity.max_sequences, max_tokens=chunk)).start()
    if records:
        width = -(-capacity.context // capacity.block_size)
        runner.record(max_sequences=capacity.max_sequences, max_blocks=width)
    return runner


def _grammars(
    text_processor: TextProcessor | None, runner: StepRunner, capacity: Capacity
) -> GrammarsOfAdapters | None:
    if text_processor is None:
        return None
    grammars = GrammarsOfAdapters(text_processor, vocab_size=capacity.vocab_size)
    for name, own in text_processor.adapters.items():
        grammars.add(name, own, vocab_size=capacity.vocab_size + runner.num_new_tokens[name])
    return grammars


def _capacity(part: ModelShard, config: EngineConfig) -> Capacity:
    model, device = part.model.config, part.device
    longest = model.context
    if config.max_context is not None and config.max_context > longest:
        raise ConfigError(
            f"max_context is beyond the model's context of {longest:,} tokens",
            got=config.max_context,
            fix="Leave it out, or give less.",
        )
    context = config.max_context or longest
    block_bytes = bytes_per_block(
        rows_of(part.groups),
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
        block_bytes *= config.tensor_parallel  # the counted memory holds the pages of all ranks
    return Capacity(
        context=context,
        vocab_size=model.vocab_size,
        num_blocks=num_blocks_for(
            _cache_bytes(part, config, tokens_per_step=tokens_per_step, context=context),
            block_bytes=block_bytes,
            blocks_of=partial(
                blocks_of,
                windows=[group.window for group in part.groups],
                block_size=config.block_size,
                share_tokens=min(tokens_per_step, defaults_of(device.type).piece_tokens),
            ),
            context=context,
            max_sequences=config.max_sequences,
        ),
        block_size=config.block_size,
        tokens_per_step=tokens_per_step,
        max_sequences=config.max_sequences,
    )


def _cache_bytes(part: ModelShard, config: EngineConfig, *, tokens_per_step: int, context: int) -> int:
    if config.cache_gib is not None:
        return int(config.cache_gib * 2**30)
    share = defaults_of(part.device.type).share_of_free
    if part.device.type == "cpu":
        return int(env.available_bytes() * share)
    taken = 0
    if config.tensor_parallel == 1:
        taken = activation_bytes(
            part,
            tokens_per_step=tokens_per_step,
            max_sequences=config.max_sequences,
            block_size=config.block_size,
            context=context,
        )
        if are_wanted(config.compile, device=part.device, ranks=config.tensor_parallel):
            taken += graph_bytes(
                part,
                max_sequences=config.max_sequences,
                max_blocks=-(-context // config.block_size),
                block_size=config.block_size,
            )
    free, _ = accelerator.free_and_total_bytes(part.device)
    return int(free * share) - taken

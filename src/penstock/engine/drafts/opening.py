"""From `EngineConfig.drafts` to a drafter that fits the model: the one file that knows all of them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from penstock.checkpoint.speculator import is_speculator, load_speculator
from penstock.core.errors import ConfigError, ModelError, UsageError
from penstock.engine.adapters import Adapters
from penstock.engine.capacity import Capacity
from penstock.engine.config import EngineConfig
from penstock.engine.drafting import Drafting
from penstock.engine.drafts.drafter import Drafter
from penstock.engine.drafts.heads import HeadsDrafter
from penstock.engine.drafts.model import ModelDrafter, num_spare_blocks
from penstock.engine.drafts.ngram import NgramDrafter
from penstock.engine.drafts.pace import Pace
from penstock.engine.fuse import fuse
from penstock.engine.kv_cache import PagedCache, bytes_per_block, type_of_pages
from penstock.engine.open import open_model
from penstock.engine.runner import Runner
from penstock.engine.weights import prepare
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.models.speculator import Speculator

Source = Llama | Speculator | None
"""The network that guesses, where one does."""


def open_source(
    config: EngineConfig,
    base: LlamaConfig,
    tokenizer: Path | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Source:
    """Open the network that `drafts` names, if it names one.

    Args:
        base: of the model that it guesses for.
        tokenizer: of that model.
        dtype: of both networks' activations.

    Raises:
        ConfigError: `drafts` is neither a word nor a folder.
        ModelError: the network does not fit the model.
    """
    if config.drafts in ("off", "ngram"):
        return None
    folder = Path(config.drafts)
    if not folder.is_dir():
        raise ConfigError(
            "drafts must be off, ngram, or the folder of a draft model or a speculator",
            got=config.drafts,
            fix="Heads are made by `penstock tune --speculator`.",
        )
    if is_speculator(folder):
        speculator = load_speculator(folder, dtype=dtype)
        _check_sizes(folder, speculator, base)
        return speculator.to(device)
    try:
        model, own_tokenizer = open_model(folder)
    except UsageError as error:
        raise ConfigError(f"drafts: {error}") from None
    _check_tokens(folder, model.config, own_tokenizer, base, tokenizer)
    model.to(device=device, dtype=dtype)
    fuse(model)
    prepare(model, "stored")
    return model


def bytes_of_block(source: Source, config: EngineConfig) -> int:
    """Return what a block of the cache takes in the pages of a draft model; 0 without one."""
    if not isinstance(source, Llama):
        return 0
    return bytes_per_block(
        source.config.num_hidden_layers,
        block_size=config.block_size,
        kv_heads=source.config.key_value_heads,
        head_dim=source.config.size_of_head,
        dtype=_pages_dtype(source, config),
    )


def _pages_dtype(model: Llama, config: EngineConfig) -> torch.dtype:
    head_dim = model.config.size_of_head
    return type_of_pages(config.cache, dtype=model.norm.weight.dtype, head_dim=head_dim)


def build_drafting(config: EngineConfig, source: Source, capacity: Capacity) -> Drafting | None:
    """Return what puts drafts on sequences; None: nothing does."""
    if config.drafts == "off":
        return None
    most, drafter = config.num_drafts, _drafter(config, source, capacity)
    if isinstance(source, Speculator):
        most = min(most, source.config.n_predict)
    return Drafting(drafter, Pace(most=most, adapt=config.adapt_drafts))


def _drafter(config: EngineConfig, source: Source, capacity: Capacity) -> Drafter:
    if isinstance(source, Llama):
        return _model_drafter(config, source, capacity)
    return NgramDrafter() if source is None else HeadsDrafter(source)


def _model_drafter(config: EngineConfig, model: Llama, capacity: Capacity) -> ModelDrafter:
    spare = num_spare_blocks(
        num_drafts=config.num_drafts,
        block_size=capacity.block_size,
        max_sequences=capacity.max_sequences,
    )
    cache = PagedCache(
        model.config.num_hidden_layers,
        num_blocks=capacity.num_blocks + spare,
        block_size=capacity.block_size,
        kv_heads=model.config.key_value_heads,
        head_dim=model.config.size_of_head,
        dtype=_pages_dtype(model, config),
        device=model.norm.weight.device,
    )
    runner = Runner(model, cache, Adapters(model, model.config))
    return ModelDrafter(
        lambda batch: runner.run(batch).logits,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        vocab_size=capacity.vocab_size,
        context=model.config.context,
        num_drafts=config.num_drafts,
    )


def _check_sizes(folder: Path, speculator: Speculator, base: LlamaConfig) -> None:
    for name, own, wanted in (
        ("vocab_size", speculator.config.vocab_size, base.vocab_size),
        ("emb_dim", speculator.config.emb_dim, base.hidden_size),
    ):
        if own != wanted:
            raise ModelError(
                f"The speculator in {folder} is for another model: this one needs {name} {wanted:,}",
                got=own,
                fix="Train one for this model with `penstock tune --speculator`.",
            )


def _check_tokens(
    folder: Path, model: LlamaConfig, own: Path | None, base: LlamaConfig, tokenizer: Path | None
) -> None:
    """Refuse a draft model that does not know a token, or for which its number is another token."""
    fix = "Take a smaller model of the same family."
    if model.vocab_size < base.vocab_size:
        raise ModelError(
            f"The draft model in {folder} does not know all of the model's {base.vocab_size:,} tokens",
            got=model.vocab_size,
            fix=fix,
        )
    if own is None or tokenizer is None:
        return
    known, needed = (Tokenizer.from_file(str(file)).get_vocab() for file in (own, tokenizer))
    wrong = [token for token, number in needed.items() if known.get(token) != number]
    if wrong:
        raise ModelError(
            f"The draft model in {folder} has another number for a token of the model", got=wrong[0], fix=fix
        )

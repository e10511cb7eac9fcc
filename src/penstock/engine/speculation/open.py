"""Open the drafter that `EngineConfig.drafts` names; the only file that imports all drafters."""

from collections.abc import Sequence as Many
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.checkpoint.speculator import is_speculator, load_speculator
from penstock.core.errors import ConfigError, ModelError, UsageError
from penstock.core.packages import Package
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.capacity import Capacity
from penstock.engine.model_runner.kv_cache import PagedCache, bytes_per_block, type_of_pages
from penstock.engine.model_runner.lora import Adapters
from penstock.engine.model_runner.open import open_model
from penstock.engine.model_runner.runner import Runner
from penstock.engine.model_runner.serving_layers import fuse, prepare
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.draft_length import DraftLength
from penstock.engine.speculation.draft_model import ModelDrafter, num_spare_blocks
from penstock.engine.speculation.ngram import NgramDrafter
from penstock.engine.speculation.speculation import CompletedStep, Drafter, Speculation, known_tokens
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.models.speculator import Speculator

if TYPE_CHECKING:
    import tokenizers
else:
    tokenizers = Package("tokenizers", "Tokenizers")


class HeadsDrafter:
    """Drafts with a speculator's heads, from the last token and the hidden state it was sampled from.

    Args:
        speculator: on the model's device, in its dtype.
    """

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    @torch.inference_mode()
    def propose(self, done: CompletedStep, wanted: Many[int]) -> list[tuple[int, ...]]:
        """Return drafts; see `Drafter`."""
        chosen = [index for index, num in enumerate(wanted) if num]
        if not chosen:
            return [()] * len(wanted)
        starts, num_kept, device = done.batch.query_starts, done.num_kept, done.hidden.device
        rows = torch.tensor([int(starts[i]) + num_kept[i] - 1 for i in chosen], device=device)
        last = known_tokens([done.sampled[i][-1] for i in chosen], self._speculator.config.vocab_size)
        tokens = torch.tensor(last, device=device)
        guesses = self._speculator.guesses(done.hidden[rows], tokens, num=max(wanted))
        found = iter(guesses.tolist())
        return [tuple(islice(next(found), num)) if num else () for num in wanted]

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: there is no state per sequence."""


DraftSource = Llama | Speculator | None
"""Network that drafts; None: drafting needs no network, or is off."""


def open_source(
    config: EngineConfig,
    base: LlamaConfig,
    tokenizer: Path | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftSource:
    """Open the network that `drafts` names; None if it names none.

    Args:
        base: config of the model that is drafted for.
        tokenizer: tokenizer.json of that model.
        dtype: dtype of the activations of both networks.

    Raises:
        ConfigError: `drafts` is not off, ngram or a folder.
        ModelError: the network does not fit the model.
    """
    if config.drafts in ("off", "ngram"):
        return None
    folder = Path(config.drafts)
    if not folder.is_dir():
        raise ConfigError(
            "drafts must be off, ngram, or the folder of a draft model or a speculator",
            got=config.drafts,
            fix="Train a speculator with `penstock train-speculator`.",
        )
    if is_speculator(folder):
        speculator = load_speculator(folder, dtype=dtype)
        _check_sizes(folder, speculator, base)
        return speculator.to(device)
    try:
        model, own_tokenizer = open_model(folder, ignored_keys=config.ignored_keys)
    except UsageError as error:
        raise ConfigError(f"drafts: {error}") from None
    _check_tokens(folder, model.config, own_tokenizer, base, tokenizer)
    model.to(device=device, dtype=dtype)
    fuse(model)
    prepare(model, "stored")
    return model


def bytes_of_block(source: DraftSource, config: EngineConfig) -> int:
    """Return the bytes of a KV block in the pages of a draft model; 0 without one."""
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


def build_drafting(config: EngineConfig, source: DraftSource, capacity: Capacity) -> Speculation | None:
    """Return the speculative decoding of a config; None: it is off."""
    if config.drafts == "off":
        return None
    most, drafter = config.num_drafts, _drafter(config, source, capacity)
    if isinstance(source, Speculator):
        most = min(most, source.config.n_predict)
    return Speculation(drafter, DraftLength(most=most, adapt=config.adapt_drafts))


def _drafter(config: EngineConfig, source: DraftSource, capacity: Capacity) -> Drafter:
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
                fix="Train one for this model with `penstock train-speculator`.",
            )


def _check_tokens(
    folder: Path, model: LlamaConfig, own: Path | None, base: LlamaConfig, tokenizer: Path | None
) -> None:
    """Raise ModelError if the draft model lacks a token of the model or numbers it differently."""
    fix = "Use a smaller model of the same family."
    if model.vocab_size < base.vocab_size:
        raise ModelError(
            f"The draft model in {folder} does not have all of the model's {base.vocab_size:,} tokens",
            got=model.vocab_size,
            fix=fix,
        )
    if own is None or tokenizer is None:
        return
    known, needed = (tokenizers.Tokenizer.from_file(str(file)).get_vocab() for file in (own, tokenizer))
    wrong = [token for token, number in needed.items() if known.get(token) != number]
    if wrong:
        raise ModelError(
            f"The draft model in {folder} has another id for a token of the model", got=wrong[0], fix=fix
        )

"""Open the drafter that `EngineConfig.drafts` names; the only file that imports all drafters."""

from collections.abc import Sequence as Many
from itertools import islice
from pathlib import Path

import torch

from penstock.checkpoint.speculator import is_speculator, load_speculator
from penstock.core.errors import ConfigError, ModelError
from penstock.engine.config import EngineConfig
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.draft_length import DraftLength
from penstock.engine.speculation.ngram import NgramDrafter
from penstock.engine.speculation.speculation import CompletedStep, Speculation, known_tokens
from penstock.models.decoder.config import DecoderConfig
from penstock.models.speculator import Speculator


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


def open_speculator(
    config: EngineConfig, base: DecoderConfig, *, dtype: torch.dtype, device: torch.device
) -> Speculator | None:
    """Open the speculator that `drafts` names; None if it names none.

    Args:
        base: config of the model that is drafted for.
        dtype: dtype of the activations of both networks.

    Raises:
        ConfigError: `drafts` is not off, ngram or the folder of a speculator.
        ModelError: the speculator does not fit the model.
    """
    if config.drafts in ("off", "ngram"):
        return None
    folder = Path(config.drafts)
    if not is_speculator(folder):
        raise ConfigError(
            "drafts must be off, ngram, or the folder of a speculator",
            got=config.drafts,
            fix="Train a speculator with `penstock train-speculator`.",
        )
    speculator = load_speculator(folder, dtype=dtype)
    _check_sizes(folder, speculator, base)
    return speculator.to(device)


def build_drafting(config: EngineConfig, speculator: Speculator | None) -> Speculation | None:
    """Return the speculative decoding of a config; None: it is off."""
    if config.drafts == "off":
        return None
    if speculator is None:
        return Speculation(NgramDrafter(), DraftLength(most=config.num_drafts, adapt=config.adapt_drafts))
    most = min(config.num_drafts, speculator.config.n_predict)
    return Speculation(HeadsDrafter(speculator), DraftLength(most=most, adapt=config.adapt_drafts))


def _check_sizes(folder: Path, speculator: Speculator, base: DecoderConfig) -> None:
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

"""Offline evaluation: scores a model on a run's held-out rows, or once over any corpora.

The rows of a run come from its recipe by the function that training calls, so the scores are those that it
logged. Of other corpora every row is scored, or the first ones of a shuffled pass, which are a fair sample of
the whole.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.checkpoint.layout import INDEX_FILE
from penstock.core import config as configs
from penstock.core.errors import UsageError
from penstock.data import Loader
from penstock.devices import accelerator
from penstock.engine.model_runner.open import open_model
from penstock.evaluation.options import TextEvalOptions
from penstock.models.decoder.model import Decoder
from penstock.obs.metric_names import RECIPE_FILE
from penstock.text.token_bytes import token_bytes
from penstock.text.tokenizer import Tokenizer
from penstock.train.data_setup import FIELDS, Heldout, bytes_of_tokens, heldout_rows
from penstock.train.evaluate import score_rows
from penstock.train.recipe.config import TrainConfig
from penstock.train.score import Score

_LONGEST_ROW = 4096
_PASS_TOKENS = 8192  # per forward pass: enough to use a processor fully, with little memory


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model ready for scoring."""

    model: Decoder
    tokenizer: Tokenizer | None
    device: torch.device


def recipe_of(path: Path) -> TrainConfig | None:
    """Return the recipe of a run, given its folder or one of its checkpoints; None: not a run."""
    run = path.resolve().parent.parent if (path / INDEX_FILE).is_file() else path
    file = run / RECIPE_FILE
    raw = configs.load_json(file) if file.is_file() else {}
    return configs.build(TrainConfig, raw) if "run" in raw else None  # Hugging Face uses the file name too


def open_for_scoring(path: Path, *, compute: str, ignored_keys: Collection[str] = ()) -> OpenedModel:
    """Open a run, a checkpoint or a Hugging Face folder, on the GPU if there is one.

    Args:
        compute: "float32" or "bfloat16".
        ignored_keys: as in `open_model`.

    Raises:
        UsageError: the folder does not exist.
        ModelError, CheckpointError: the folder has no model that can be opened.
    """
    model, file = open_model(path, ignored_keys=ignored_keys)
    device = accelerator.choose()
    moved = model.to(device=device, dtype=getattr(torch, compute))
    return OpenedModel(model=moved, tokenizer=None if file is None else Tokenizer.load(file), device=device)


def own_rows(path: Path, *, rows: int | None) -> Heldout:
    """Open the held-out rows that a run validates on, or the first `rows` of them.

    Raises:
        UsageError: not a run, or a run without validation, or one on preferences.
    """
    recipe = recipe_of(path)
    if recipe is not None and recipe.tune is not None and recipe.tune.is_preference:
        raise UsageError(
            f"{path} is validated on preferences (tune.loss {recipe.tune.loss!r}), not on tokens",
            fix="See its report for rewards and accuracies, or give --corpus DIR.",
        )
    heldout = None if recipe is None else heldout_rows(recipe)
    if heldout is None:
        why = "is not a run" if recipe is None else "is a run without validation"
        raise UsageError(f"{path} {why}, so it has no held-out rows of its own", fix="Give --corpus DIR.")
    return replace(heldout, rows=min(heldout.rows, rows or heldout.rows))


def rows_of(name: str, corpus: str, wanted: TextEvalOptions, *, context: int) -> Heldout:
    """Open the rows of one corpus.

    Args:
        name: name of the corpus in the run; decides which documents are held out.
        context: maximum row length of the model, in tokens.

    Raises:
        UsageError: rows longer than the context.
        CorpusError: the corpus does not exist or is damaged.
    """
    length = wanted.sequence_length
    if length is None:
        length = min(context, _LONGEST_ROW)
    if length > context:
        raise UsageError(
            f"Rows of {length} tokens are longer than the model's context of {context}",
            fix="Lower --sequence-length.",
        )
    loader = Loader(
        {name: corpus},
        sequence_length=length,
        global_batch_size=1,
        epochs={name: 1},
        split="heldout" if wanted.holdout else "train",
        holdout=wanted.holdout or 0.0,
        fields=FIELDS,
        num_workers=0,
    )
    most = loader.num_samples
    assert most is not None, "one pass has an end"
    return Heldout(loader=loader, rows=min(most, wanted.rows or most), token_bytes=bytes_of_tokens(loader))


def is_of_another_tokenizer(opened: OpenedModel, heldout: Heldout) -> bool:
    """True if a corpus names another tokenizer file than the model's."""
    known = {corpus.manifest.tokenizer for corpus in heldout.loader.corpora.values()} - {None}
    return opened.tokenizer is not None and bool(known - {opened.tokenizer.fingerprint})


def scores_of(opened: OpenedModel, heldout: Heldout, *, on_rows: Callable[[int], None]) -> dict[str, Score]:
    """Score a model on rows, by corpus.

    Args:
        on_rows: called now and then with the number of rows done.

    Raises:
        CorpusError: a token id is outside the model's vocabulary.
    """
    if heldout.token_bytes is None and opened.tokenizer is not None:
        heldout = replace(heldout, token_bytes=token_bytes(opened.tokenizer))

    opened.model.limit_texts(heldout.loader.sequence_length)
    rows = min(max(1, _PASS_TOKENS // heldout.loader.sequence_length), heldout.rows)
    sums = score_rows(opened.model, heldout, device=opened.device, rows=rows, on_rows=on_rows)
    return {
        name: Score(nats=nats, tokens=round(tokens), text_bytes=round(size))
        for name, (nats, tokens, size) in sums.items()
    }

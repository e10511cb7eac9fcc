"""Data of a recipe: training rows, held-out rows, checks that they suffice, and ends of turns."""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.checkpoint.find import SavedCheckpoint, saved_in
from penstock.checkpoint.layout import Meta, check_adapter, check_model
from penstock.checkpoint.start import text_folder
from penstock.checkpoint.storage import place_in
from penstock.core.arrays import Int64
from penstock.core.errors import CheckpointDamaged, CheckpointError, ConfigError
from penstock.core.files import TOKENIZER_FILE
from penstock.core.log import EventLog
from penstock.data import Corpus, Loader
from penstock.data.corpus.columns import LEARNED
from penstock.data.schedule.change_log import Change
from penstock.text.token_bytes import token_bytes
from penstock.text.tokenizer import Tokenizer
from penstock.train.recipe.config import RunConfig, TrainConfig
from penstock.train.recipe.planned_changes import changes, micro_batch_sizes
from penstock.train.tune.check_corpora import check_corpora

log = EventLog(__name__)

FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids")
"""Batch fields that a training step needs."""
_TURN_TOKENS = 2**18  # in which ends of turns are looked for
_MIN_TURN_SHARE = 0.01  # of the turns: conversations that were cut end anywhere


def train_loader(config: TrainConfig, *, rank: int, world_size: int, **options: Any) -> Loader:
    """Open the training loader of a recipe for one rank.

    Args:
        options: arguments of `Loader` that override those of the recipe.
    """
    data = config.data
    recipe: dict[str, Any] = {
        "weights": data.weights,
        "sequence_length": data.sequence_length,
        "global_batch_size": data.global_batch_size,
        "rank": rank,
        "world_size": world_size,
        "seed": config.run.seed,
        "packing": data.packing,
        "overlong": data.overlong,
        "fields": FIELDS,
        "epochs": data.epochs,
        "holdout": data.holdout,
        "num_workers": data.num_workers,
        "prefetch": data.prefetch,
    }
    if options.get("split", "train") == "train":
        recipe["schedule"] = _schedule(config)
        recipe["micro_batch_size"] = micro_batch_sizes(data)
    return Loader(data.paths, **{**recipe, **options})


def _schedule(config: TrainConfig) -> list[Change]:
    data = config.data
    first = data.weights
    if first is None and any(change.weights for change in data.schedule):  # a ramp starts from some shares
        first = Loader(
            data.paths,
            sequence_length=data.sequence_length,
            global_batch_size=data.global_batch_size,
            holdout=data.holdout,
            packing=data.packing,
            overlong=data.overlong,
            deliver="numpy",
        ).weights
    return changes(data, first or dict.fromkeys(data.corpora, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """Validation rows: samples [0, rows) of a loader."""

    loader: Loader
    rows: int
    token_bytes: Int64 | None = None
    """[vocabulary] bytes of text per token id; None: no corpus names its tokenizer."""


def heldout_rows(config: TrainConfig, **options: Any) -> Heldout | None:
    """Open the held-out rows of a recipe, a share of each corpus; None: the recipe does not validate.

    Raises:
        ConfigError: the first part of a corpus that is prepared during the run has no held-out document.
    """
    if not config.validate.every:
        return None
    once = dict.fromkeys(config.data.corpora, 1)
    size = {"split": "heldout", "global_batch_size": 1, "epochs": once, "seed": 0}
    loader = train_loader(config, rank=0, world_size=1, **size, **options)
    quotas = shares_of(config.validate.samples, loader.weights, loader.first_rows)
    for name, corpus in loader.corpora.items():
        if loader.weights[name] and not quotas[name]:
            raise ConfigError(
                f"A holdout of {config.data.holdout} leaves no document of the first part of corpus {name!r} "
                f"to validate on: it has {corpus.part_ends[0]:,} tokens",
                fix="Set validate.every = 0, or for a new run raise data.holdout or its first_part_tokens.",
            )
    loader.set_weights(quotas, reason="validation")  # the first rows then hold the quota of each corpus
    rows, most = sum(quotas.values()), loader.num_samples  # None for a corpus that grows
    rows = rows if most is None else min(rows, most)
    return Heldout(loader=loader, rows=rows, token_bytes=bytes_of_tokens(loader))


def bytes_of_tokens(loader: Loader) -> Int64 | None:
    """Return the bytes of text per token id of the corpora; None: unknown.

    Corpora that do not name their tokenizer are assumed to share that of the others.
    """
    path = tokenizer_of(loader)
    return None if path is None else token_bytes(Tokenizer.load(path))


def tokenizer_of(loader: Loader) -> Path | None:
    """Return the tokenizer.json of the corpora: if they differ, the largest; None: unknown."""
    return next(iter(tokenizers_of(loader)), None)


def tokenizers_of(loader: Loader) -> list[Path]:
    """Return the files of the corpora's tokenizer: of conversations first, whose folders have its template.

    If corpora have different tokenizers, it is the largest.
    """
    known = list(_tokenizers(loader).values())
    if len(known) < 2:
        return next(iter(known), [])
    return max(known, key=lambda paths: Tokenizer.load(paths[0]).vocab_size)


def warn_of_templates(loader: Loader) -> None:
    """Log that corpora were written by different chat templates, if they were."""
    found = {name: c.manifest.chat.template for name, c in loader.corpora.items() if c.manifest.chat}
    if len(set(found.values())) > 1:
        log.warning(
            "templates_differ",
            "Corpora were written by different chat templates; the run keeps the first's: {templates}",
            templates=found,
        )


def warn_of_packing(config: TrainConfig, loader: Loader) -> None:
    """Log that packing may part an answer from its question, if it may."""
    chats = [name for name, corpus in loader.corpora.items() if LEARNED in corpus.columns]
    if chats and config.data.packing != "whole":
        log.warning(
            "packing_cuts",
            "data.packing {packing!r} may cut a conversation of {corpora}, and the rest of an "
            "answer is then learned without its question. data.packing = 'whole' cuts none",
            packing=config.data.packing,
            corpora=chats,
        )


def _tokenizers(loader: Loader) -> dict[str, list[Path]]:
    """Return fingerprint -> tokenizer.json of each corpus that has one, of conversations first."""
    found: dict[str, list[Path]] = {}
    for corpus in sorted(loader.corpora.values(), key=lambda corpus: corpus.manifest.chat is None):
        if corpus.tokenizer_path is not None:
            found.setdefault(corpus.manifest.tokenizer or "", []).append(corpus.tokenizer_path)
    return found


def shares_of(samples: int, weights: Mapping[str, float], most: Mapping[str, int]) -> dict[str, int]:
    """Divide rows over corpora by weight: at least one each, at most as many as exist.

    >>> shares_of(10, {"a": 0.9, "b": 0.08, "c": 0.02}, {"a": 5, "b": 7, "c": 7})
    {'a': 5, 'b': 1, 'c': 1}
    """
    return {
        name: min(max(round(samples * weight), 1), most[name]) if weight else 0
        for name, weight in weights.items()
    }


def checkpoints(config: TrainConfig) -> list[SavedCheckpoint]:
    """Return the complete checkpoints of the run, oldest first."""
    return saved_in(place_in(Path(config.run.dir), config.checkpoint.dir))


def continue_from(config: TrainConfig, loader: Loader, saved: SavedCheckpoint) -> Meta:
    """Move a loader to a checkpoint; return the checkpoint's metadata.

    Raises:
        CheckpointDamaged: its index is damaged.
        CheckpointError: it is of another model or adapter, or started from other weights.
        StateMismatch: it is of other data settings.
        CorpusChanged: a corpus was altered since.
    """
    meta = saved.index().meta
    check_start(meta, config.run, checkpoint=str(saved))
    check_model(meta, config.model, checkpoint=str(saved))
    check_adapter(meta, config.adapter, checkpoint=str(saved))
    loader.load_state_dict(meta.loader, on_change="apply")  # an edited recipe takes effect
    return meta


def check_start(meta: Meta, run: RunConfig, *, checkpoint: str) -> None:
    """Refuse a checkpoint of a run that started from other weights.

    Raises:
        CheckpointError: the message has both folders and identities.
    """
    if meta.start_hash == run.start_hash:
        return
    was, now = (
        f"{folder} ({identity[:16]})" if identity else "random weights"
        for folder, identity in ((meta.start_from, meta.start_hash), (run.start_from, run.start_hash))
    )
    raise CheckpointError(
        f"Checkpoint {checkpoint} is of a run that started from {was}, and run.start_from is now {now}",
        fix="Give the folder it started from (a copy will do), or choose another run.dir.",
    )


def continue_from_newest(config: TrainConfig, loader: Loader) -> None:
    """Move a loader to the newest checkpoint with an intact index, if there is one; see `continue_from`."""
    for saved in reversed(checkpoints(config)):
        with suppress(CheckpointDamaged):
            continue_from(config, loader, saved)
            return


def check_data(config: TrainConfig, loader: Loader) -> None:
    """Refuse corpora that are not what the recipe learns from, are too small, or have other tokenizers.

    Raises:
        ConfigError: with the corpus.
    """
    check_corpora(config, loader.corpora)
    check_supply(config, loader)
    check_tokenizers(loader, start_from=config.run.start_from)


def check_tokenizers(loader: Loader, *, start_from: str = "") -> None:
    """Refuse corpora that were made with different tokenizers, or another than the start's, as far as known.

    Corpora of other tools do not name their tokenizer, and are accepted. So are tokenizers that differ by
    added tokens only.

    Args:
        start_from: `run.start_from`.

    Raises:
        ConfigError: they were made with different tokenizers.
    """
    corpora: dict[str, list[str]] = {}
    for name, corpus in sorted(loader.corpora.items()):
        if corpus.manifest.tokenizer:
            corpora.setdefault(corpus.manifest.tokenizer, []).append(name)
    files = _tokenizers(loader)
    if not corpora or (len(corpora) == 1 and not start_from):
        return
    if files.keys() >= corpora.keys() and (path := tokenizer_of(loader)) is not None:
        most = Tokenizer.load(path)
        if all(most.extends(Tokenizer.load(files[each][0])) for each in corpora):
            if start_from:
                _check_tokenizer_of_start(most, Path(start_from), corpora)
            return
    if len(corpora) > 1:
        raise ConfigError(
            "The corpora were made with different tokenizers",
            got="; ".join(f"{', '.join(names)}: {tokenizer[:16]}" for tokenizer, names in corpora.items()),
            fix="Prepare them with the same --tokenizer.",
        )


def _check_tokenizer_of_start(ours: Tokenizer, start: Path, corpora: Mapping[str, list[str]]) -> None:
    path = text_folder(start) / TOKENIZER_FILE
    if path.is_file() and not ours.extends(theirs := Tokenizer.load(path)):
        names = ", ".join(name for names in corpora.values() for name in names)
        raise ConfigError(
            f"Corpora and starting weights have different tokenizers, so that the ids of the one mean other "
            f"text to the other: {names}: {ours.fingerprint[:16]}; {path}: {theirs.fingerprint[:16]}",
            fix=f"Prepare the corpora with --tokenizer {path.parent}.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Step at which a run reaches the end of a capped corpus."""

    step: int
    """Number of steps that can be taken."""
    corpus: str
    epochs: int
    """Maximum number of epochs."""

    def __str__(self) -> str:
        epochs = "its one epoch" if self.epochs == 1 else f"its {self.epochs:,} epochs"
        return f"corpus {self.corpus!r} reaches the end of {epochs} at step {self.step:,}"


def shortage(config: TrainConfig, loader: Loader) -> Shortage | None:
    """Return where the capped corpora end before the run does, from its present state; None: they suffice."""
    steps, supply = range(config.run.steps), loader.num_samples
    if supply is None or int(loader.samples_of(steps[-1])[-1]) < supply:
        return None
    last = bisect_right(steps, supply, key=lambda step: int(loader.samples_of(step)[-1]) + 1)
    caps, passed = config.data.epochs, loader.epochs_by_corpus(last + 1)
    name = max(caps, key=lambda name: passed[name] / caps[name])
    return Shortage(step=last, corpus=name, epochs=caps[name])


def check_supply(config: TrainConfig, loader: Loader) -> None:
    """Refuse a run that needs more data than its capped corpora have.

    Raises:
        ConfigError: with the step at which the data runs out.
    """
    if short := shortage(config, loader):
        run = config.run
        needed = int(loader.samples_of(run.steps - 1)[-1]) + 1
        length = f"run.steps {run.steps}" if run.epochs is None else f"run.epochs {run.epochs:g}"
        raise ConfigError(
            f"{length} needs {needed:,} sequences, but {short}",
            fix=f"Lower {run.length_key}, raise the corpus's epochs, or lower its weight.",
        )


def turn_ends(corpus: Corpus, control: Collection[int]) -> set[int]:
    """Return the tokens that end learned turns at the beginning of a corpus of conversations.

    A model that learned them stops at them. A base model's own end token is often another, `<|endoftext|>`
    beside `<|im_end|>` say. The run's `generation_config.json` names both, so that whatever opens the run, or
    what is exported of it, stops.

    Args:
        control: token ids that structure a conversation; no other ends a turn.
    """
    stop = min(int(corpus.starts[1]), _TURN_TOKENS)
    learned = corpus.columns[LEARNED].values(0, 0, stop)
    lasts = np.flatnonzero(learned[:-1] & ~learned[1:])
    ids, counts = np.unique(corpus.tokens(0, stop)[lasts], return_counts=True)
    often = ids[counts >= _MIN_TURN_SHARE * len(lasts)].tolist()
    return {token for token in often if token in control}

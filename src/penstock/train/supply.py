"""The data of a recipe: its training rows, its held-out rows, and whether they suffice."""

from bisect import bisect_right
from pathlib import Path
from typing import Any

from penstock.checkpoint.layout import check_model, complete, read_meta
from penstock.core.errors import ConfigError
from penstock.data import Loader
from penstock.train.config import TrainConfig

_FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids")


def train_loader(config: TrainConfig, *, rank: int, world_size: int, **options: Any) -> Loader:
    """Open the loader of a recipe for one rank.

    Args:
        options: of `Loader`, over those of the recipe.
    """
    data = config.data
    recipe = {
        "weights": data.weights,
        "sequence_length": data.sequence_length,
        "global_batch_size": data.global_batch_size,
        "rank": rank,
        "world_size": world_size,
        "seed": config.run.seed,
        "packing": data.packing,
        "fields": _FIELDS,
        "epochs": data.epochs,
        "holdout": data.holdout,
        "num_workers": data.num_workers,
        "prefetch": data.prefetch,
    }
    return Loader(data.paths, **{**recipe, **options})


def heldout_loader(config: TrainConfig, **options: Any) -> Loader | None:
    """Open the held-out rows of a recipe, or return None where it does not validate."""
    if not config.validate.every:
        return None
    once = dict.fromkeys(config.data.corpora, 1)
    return train_loader(
        config, rank=0, world_size=1, split="heldout", global_batch_size=1, epochs=once, seed=0, **options
    )


def continue_from(config: TrainConfig, loader: Loader) -> Path | None:
    """Move a loader to the newest complete checkpoint of the run and return it; None at the start.

    Raises:
        CheckpointError: it is damaged or of another model.
        StateMismatch: of other data settings.
        CorpusChanged: a corpus was altered since.
    """
    saved = complete(Path(config.run.dir))
    if not saved:
        return None
    meta = read_meta(saved[-1])
    check_model(meta, config.model, checkpoint=saved[-1])
    loader.load_state_dict(meta.loader)
    return saved[-1]


def check_tokenizers(loader: Loader) -> None:
    """Refuse corpora whose tokens mean different things.

    Raises:
        ConfigError: they were made with different tokenizers.
    """
    tokenizers = {name: corpus.manifest.tokenizer for name, corpus in loader.corpora.items()}
    if len(set(tokenizers.values())) > 1:
        raise ConfigError(
            f"The corpora were made with different tokenizers: {', '.join(sorted(tokenizers))}",
            fix="Prepare them with the same --tokenizer.",
        )


def check_supply(config: TrainConfig, loader: Loader) -> None:
    """Refuse a run that its capped corpora cannot feed to the end, from where the loader is.

    Raises:
        ConfigError: with the step at which data would run out.
    """
    steps, supply = range(config.run.steps), loader.num_samples
    needed = int(loader.samples_of(steps[-1])[-1]) + 1
    if supply is not None and needed > supply:
        last = bisect_right(steps, supply, key=lambda step: int(loader.samples_of(step)[-1]) + 1)
        caps = ", ".join(f"{name}: {cap}" for name, cap in config.data.epochs.items())
        raise ConfigError(
            f"run.steps {config.run.steps} needs {needed:,} sequences; with epochs capped ({caps}) the first "
            f"corpus is used up at step {last}",
            fix="Lower run.steps, raise the epochs, or lower that corpus's weight.",
        )

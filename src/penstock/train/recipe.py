"""A recipe's file to a `TrainConfig`: its values, `--set` over them, and what follows from the data."""

from pathlib import Path

from penstock.core import config
from penstock.core.config import Raw
from penstock.core.errors import ConfigError
from penstock.data.opening import vocab_size_of
from penstock.models.presets import expanded
from penstock.train.config import TrainConfig
from penstock.train.data_config import DataConfig


def load_recipe(path: Path, overrides: list[str]) -> TrainConfig:
    """Read a recipe with `--set` values over it, and fill in what follows from the data.

    `model.preset` names a published shape, whose values the section's own keys change. `model.vocab_size`
    follows from the corpora and `model.max_position_embeddings` from the sequence length where neither the
    recipe nor the preset says them.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range.
        CorpusError: a corpus is missing or damaged.
    """
    return build_recipe(read_recipe(path, overrides))


def read_recipe(path: Path, overrides: list[str]) -> Raw:
    """Read a recipe's values with `--set` values over them, and no more."""
    return config.override(config.load_toml(path), overrides)


def check_sections(raw: Raw) -> None:
    """Refuse a [data] or [model], from which other values follow, that is no section.

    Raises:
        ConfigError: one is a plain value.
    """
    for name in ("data", "model"):
        if name in raw and not isinstance(raw[name], dict):
            raise ConfigError(
                f"{name} must be a section", got=raw[name], fix=f"Write its keys under [{name}]."
            )


def build_recipe(raw: Raw) -> TrainConfig:
    """Build a recipe from plain values; see `load_recipe`."""
    check_sections(raw)
    data, model = raw.get("data"), raw.get("model")
    if isinstance(model, dict):
        model = expanded(model)
        raw = {**raw, "model": model}
    if isinstance(data, dict) and isinstance(model, dict):
        built = config.build(DataConfig, data, where="data")
        vocab_sizes = {name: vocab_size_of(path) for name, path in built.paths.items()}
        derived = {"vocab_size": max(vocab_sizes.values()), "max_position_embeddings": built.longest}
        raw = {**raw, "model": {**derived, **model}}
        _check_vocabulary(vocab_sizes, raw["model"]["vocab_size"])
    return config.build(TrainConfig, raw)


def _check_vocabulary(corpora: dict[str, int], vocab_size: object) -> None:
    for name, needed in corpora.items():
        if isinstance(vocab_size, int) and needed > vocab_size:
            raise ConfigError(
                f"Corpus {name!r} has token ids up to {needed - 1}, model.vocab_size is {vocab_size}",
                fix=f"Set model.vocab_size to at least {needed}, or leave it out.",
            )

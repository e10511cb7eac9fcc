"""Load a recipe, your own or one that comes with Penstock; apply `--set`; no torch.

Penstock's recipes are inside the package, so that an installed Penstock has them; `recipes/` at the root of
the repository is a link to them.
"""

from importlib.resources import files
from pathlib import Path

from penstock.core import config
from penstock.core.config import Raw
from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.corpus.open import has_tokenizer, vocab_size_of
from penstock.models.presets import expanded
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.data_config import DataConfig
from penstock.train.resolve.packing import with_packing, with_usual_packing
from penstock.train.resolve.run_length import with_steps
from penstock.train.resolve.start import OF_START, grown, with_start
from penstock.train.resolve.usual_names import usual_names_explained


def load_recipe(path: Path, overrides: list[str]) -> TrainConfig:
    """Read a recipe, apply `--set` values, and derive values from the data.

    With `run.start_from` the model is that of the folder, see start.py. Otherwise `model.preset` names a
    published shape, whose values the section's own keys override; `model.vocab_size` follows from the corpora
    and `model.max_position_embeddings` from the sequence length, unless the recipe or the preset sets them.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range.
        CorpusError: a corpus is missing or damaged.
    """
    return build_recipe(read_recipe(path, overrides))


def read_recipe(path: Path, overrides: list[str]) -> Raw:
    """Read a recipe's values and apply `--set` values, without validation."""
    return with_settings(config.load_toml(path), overrides)


def with_settings(raw: Raw, settings: list[str]) -> Raw:
    """Return a recipe's values with `--set` values; run.steps and run.epochs replace each other.

    >>> with_settings({"run": {"epochs": 3}}, ["run.steps=12"])
    {'run': {'steps': 12}}
    """
    result, given = config.override(raw, settings), config.override({}, settings).get("run")
    run = result.get("run")
    if isinstance(given, dict) and isinstance(run, dict) and len(keys := _LENGTH & given.keys()) == 1:
        result["run"] = {key: value for key, value in run.items() if key not in _LENGTH - keys}
    return result


_LENGTH = {"steps", "epochs"}


def check_sections(raw: Raw) -> None:
    """Refuse a [data] or [model] that is not a section, and a run of two lengths, before values are derived.

    Raises:
        ConfigError: one is a plain value, or both run.steps and run.epochs are given.
    """
    run = raw.get("run")
    if isinstance(run, dict) and all(run.get(key) is not None for key in _LENGTH):
        raise ConfigError(
            "run.steps and run.epochs are both given",
            got=f"{run['steps']} and {run['epochs']}",
            fix="Keep one. The other follows from the corpora; --dry-run shows it.",
        )
    for name in ("data", "model"):
        if name in raw and not isinstance(raw[name], dict):
            raise ConfigError(
                f"{name} must be a section", got=raw[name], fix=f"Write its keys under [{name}]."
            )


def check_command(raw: Raw, *, tunes: bool) -> None:
    """Refuse a recipe that is for the other of `penstock train` and `penstock tune`.

    Raises:
        ConfigError: it has a section [tune] and the command is `train`; or it has none, or no
            run.start_from, and the command is `tune`.
    """
    if not tunes:
        if "tune" in raw:
            raise ConfigError(
                "The recipe has a section [tune], and `penstock train` trains without one",
                fix="Type `penstock tune` with the same recipe. Without [tune] all weights learn, from "
                "run.start_from if it is given.",
            )
        return
    if "tune" not in raw:
        raise ConfigError(
            "The recipe has no section [tune], so it does not say how to tune",
            fix='Write [tune] and, below it, method = "full" or "lora"; or type `penstock train`.',
        )
    run = raw.get("run")
    if not (isinstance(run, dict) and run.get("start_from")):
        raise ConfigError(
            "The recipe names no model to tune",
            fix="Set run.start_from to a Hugging Face folder or a run, say './Qwen3-0.6B'.",
        )


_USUAL_MODEL, _USUAL_VOCABULARY = "llama3.1-8b", 32_000


@usual_names_explained()
def build_recipe(raw: Raw) -> TrainConfig:
    """Build a recipe from plain values; see `load_recipe`."""
    check_sections(raw)
    started = with_start(raw)
    starts_from_weights, raw = started is not raw, started
    data, model = raw.get("data"), raw.get("model")
    if isinstance(model, dict):
        model = expanded(model)
        raw = {**raw, "model": model}
    if isinstance(data, dict) and isinstance(model, dict):
        built = config.build(DataConfig, data, where="data")
        raw = with_packing(raw, built.paths)
        vocab_sizes = {name: vocab_size_of(path) for name, path in built.paths.items()}
        derived = {"vocab_size": max(vocab_sizes.values()), "max_position_embeddings": built.longest}
        raw = {**raw, "model": {**derived, **model}}
        if starts_from_weights:
            named = (size for name, size in vocab_sizes.items() if has_tokenizer(built.paths[name]))
            raw["model"]["vocab_size"] = grown(model["vocab_size"], needed=max(named, default=0))
        fix = f"Prepare it with --tokenizer {raw['run']['start_from']}." if starts_from_weights else None
        _check_vocabulary(vocab_sizes, raw["model"]["vocab_size"], fix=fix)
    return with_steps(config.build(TrainConfig, raw))


@usual_names_explained()
def build_for_others(raw: Raw) -> TrainConfig:
    """Build a recipe whose folders only other machines see, to check all that does not follow from them.

    The size of a vocabulary, or a model that training starts from, is replaced by a usual one. The steps of
    epochs are 0.
    """
    check_sections(raw)
    raw = with_usual_packing(raw)
    data, model = raw.get("data"), raw.get("model")
    run = raw.get("run")
    if isinstance(run, dict) and run.get("start_from") and not set(model or {}) - OF_START:
        model = {"preset": _USUAL_MODEL, **(model or {})}
    if isinstance(data, dict) and isinstance(model, dict):
        longest = config.build(DataConfig, data, where="data").longest
        usual = {"vocab_size": _USUAL_VOCABULARY, "max_position_embeddings": longest}
        raw = {**raw, "model": {**usual, **expanded(model)}}
    return config.build(TrainConfig, raw)


def _check_vocabulary(corpora: dict[str, int], vocab_size: object, *, fix: str | None) -> None:
    for name, needed in corpora.items():
        if isinstance(vocab_size, int) and needed > vocab_size:
            raise ConfigError(
                f"Corpus {name!r} has token ids up to {needed - 1}, model.vocab_size is {vocab_size}",
                fix=fix or f"Set model.vocab_size to at least {needed}, or leave it out.",
            )


_SUFFIX = ".toml"


def recipe_names() -> list[str]:
    """Return the names of Penstock's recipes, sorted."""
    found = (entry.name for entry in files("penstock").joinpath("recipes").iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))


def recipe_text(name: str) -> str:
    """Return the text of a recipe, comments included.

    Raises:
        UsageError: unknown name.
    """
    known = recipe_names()
    if name not in known:
        raise UsageError("No recipe of this name comes with Penstock", got=name, fix=nearest(name, known))
    return files("penstock").joinpath("recipes", f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def about(text: str) -> str:
    """Return the description of a recipe: the first sentence of its first comment.

    >>> about("# A small Llama. Prepare a corpus first:\\n[run]")
    'A small Llama'
    """
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip().partition(". ")[0].rstrip(".")

"""Length of a run in epochs: `run.epochs` to steps, once the corpora are read; no torch.

The steps are computed when a run begins, and kept: a start with the same recipe takes them from the run's
config.json. So a run that was killed ends at the same step as one that was not, on any number of ranks, and
whatever was changed while it trained. A start with another `run.epochs`, batch, rows or mixture in its recipe
computes them again, from where the run is.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.find import newest_meta
from penstock.core import config as configs
from penstock.core.errors import ConfigError, PenstockError
from penstock.obs.metric_names import RECIPE_FILE
from penstock.train.data_setup import checkpoints, train_loader
from penstock.train.recipe.config import TrainConfig

_COUNTED = ("sequence_length", "global_batch_size", "packing", "overlong", "holdout", "schedule")
"""Keys of [data] that the number of steps follows from, with the corpora."""

_NEAR = 0.01  # by which a weight may differ from the corpus's share of the tokens, as a part of it


def with_steps(config: TrainConfig) -> TrainConfig:
    """Return a recipe with the steps of its epochs; one that gives steps is returned as it is.

    Raises:
        ConfigError: several corpora are not mixed in proportion to their tokens, or one is still being
            prepared.
        PenstockError: a corpus or the newest checkpoint cannot be read.
    """
    if config.run.epochs is None:
        return config
    _check_mixture(config)
    steps = _kept_steps(config) or _counted_steps(config, config.run.epochs)
    return replace(config, run=replace(config.run, steps=steps))


def _kept_steps(config: TrainConfig) -> int | None:
    """Return the steps of the run's previous start, if its recipe had the same length and the same rows."""
    try:
        before = configs.load_json(Path(config.run.dir) / RECIPE_FILE)
        same = before["run"]["epochs"] == config.run.epochs
        if (
            same
            and _rows_of(before["data"]) == _rows_of(configs.dump(config)["data"])
            and checkpoints(config)
        ):
            return int(before["run"]["steps"])
    except (PenstockError, OSError, KeyError, TypeError, ValueError):
        pass
    return None


def _rows_of(data: Mapping[str, Any]) -> list[Any]:  # Any: JSON values
    corpora = {name: (of.get("weight"), of.get("epochs")) for name, of in data["corpora"].items()}
    return [corpora, *(data.get(key) for key in _COUNTED)]


def _counted_steps(config: TrainConfig, epochs: float) -> int:
    """Return the steps of the epochs: rounded up, or down where a cap on epochs leaves no rows for more."""
    loader = train_loader(config, rank=0, world_size=1, num_workers=0, deliver="numpy")
    if (meta := newest_meta(checkpoints(config))) is not None:
        loader.load_state_dict(meta.loader, on_change="apply")
    steps = loader.steps_of_epochs(epochs)
    supply = loader.num_samples
    if steps > 1 and supply is not None and int(loader.samples_of(steps - 1)[-1]) >= supply:
        return steps - 1
    return steps


def _check_mixture(config: TrainConfig) -> None:
    """Refuse a mixture of several corpora that is not in proportion to their tokens.

    Raises:
        ConfigError: with the shares.
    """
    data = config.data
    if len(data.corpora) < 2:
        return
    fix = f"Leave {{}} out, or give run.steps in place of run.epochs = {config.run.epochs:g}."
    why = "run.epochs counts passes over the rows of all corpora together, and "
    if data.is_adaptive:
        raise ConfigError(
            f"{why}data.adaptive changes their shares", got=data.adaptive.policy, fix=fix.format("it")
        )
    if any(change.weights for change in data.schedule):
        raise ConfigError(f"{why}data.schedule changes their shares", fix=fix.format("its weights"))
    if data.weights is None:
        return
    options: dict[str, Any] = {"weights": None, "num_workers": 0, "deliver": "numpy"}
    by_tokens = train_loader(config, rank=0, world_size=1, **options).weights
    total = sum(data.weights.values())
    given = {name: weight / total for name, weight in data.weights.items()} if total else data.weights
    if any(abs(given[name] - share) > _NEAR * share for name, share in by_tokens.items()):
        shares = "; ".join(f"{name}: {given[name]:.3g}, by tokens {by_tokens[name]:.3g}" for name in given)
        raise ConfigError(
            f"{why}their weights are not in proportion to their tokens", got=shares, fix=fix.format("them")
        )

"""What follows from a recipe before anything runs: sizes, rates, memory; imports no torch."""

from dataclasses import dataclass
from typing import Any

from penstock.core import config as configs
from penstock.core.errors import ConfigError
from penstock.core.units import mib, si
from penstock.data.assign import check_divisible
from penstock.obs.toml import toml_text
from penstock.train.config import TrainConfig
from penstock.train.supply import check_supply, check_tokenizers, continue_from, heldout_loader, train_loader

_STATE_BYTES = 16  # float32 weight, gradient and two AdamW moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A resolved recipe and its derived numbers."""

    recipe: dict[str, Any]
    numbers: dict[str, int | float | str]

    def as_json(self) -> dict[str, Any]:
        """Return both as JSON values."""
        return {"recipe": self.recipe, "derived": self.numbers}

    def as_text(self) -> str:
        """Return both for a person, the recipe as `--set` would write it."""
        lines = [f"{path} = {_toml(value)}" for path, value in _flat(self.recipe)]
        return "\n".join(
            [*lines, "", "derived:", *(f"  {name}: {_shown(v)}" for name, v in self.numbers.items())]
        )


def derive(config: TrainConfig, *, world_size: int) -> Derived:
    """Compute what a run would be, opening its corpora.

    Raises:
        ConfigError: the recipe cannot run on so many ranks, or its corpora cannot feed it.
    """
    data, model = config.data, config.model
    check_divisible(data.global_batch_size, world_size=world_size)
    loader = train_loader(config, rank=0, world_size=world_size, deliver="numpy")
    continue_from(config, loader)
    check_supply(config, loader)
    check_tokenizers(loader)
    heldout = heldout_loader(config)
    local = data.global_batch_size // world_size
    rows = micro_rows(config, world_size=world_size)
    tokens = data.global_batch_size * data.sequence_length
    parameters, in_all = model.num_parameters, loader.tokens_before(config.run.steps)
    numbers: dict[str, int | float | str] = {
        "parameters": parameters,
        "ranks": world_size,
        "rows per rank and step": local,
        "micro-batches per step": -(-local // rows),
        "tokens per step": tokens,
        "tokens in the run": in_all,
        "FLOP per token": model.flops_per_token(data.sequence_length),
        "FLOP in the run": model.flops_per_token(data.sequence_length) * in_all,
        "weights, gradients and optimizer per rank": mib(parameters * _STATE_BYTES / world_size),
        "checkpoint": mib(parameters * 12),
    }
    for name, epochs in loader.epochs_by_corpus(config.run.steps).items():
        numbers[f"epochs of {name}"] = round(epochs, 3)
    if heldout is not None:
        numbers["validation rows"] = min(config.validate.samples, heldout.num_samples or 0)
    return Derived(recipe=configs.dump(config), numbers=numbers)


def micro_rows(config: TrainConfig, *, world_size: int) -> int:
    """Return the rows of one forward pass on one rank.

    Raises:
        ConfigError: micro_batch_size does not divide a rank's share of the batch.
    """
    local = config.data.global_batch_size // world_size
    rows = config.data.micro_batch_size or local
    if local % rows:
        raise ConfigError(
            f"data.micro_batch_size {rows} does not divide a rank's {local} rows "
            f"(batch {config.data.global_batch_size} over {world_size} ranks)",
            fix="Choose a divisor, or leave it out.",
        )
    return rows


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found.append((f"{prefix}{name}", value))
    return found


def _toml(value: Any) -> str:
    return toml_text({"value": value}).removeprefix("value = ")


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,} ({si(value)})" if isinstance(value, int) and value >= 10_000 else f"{value:.4g}"

"""What a recipe would train, and what it would take on so many devices, without its corpora; no torch.

`penstock train --dry-run` says more of a recipe whose corpora are there. Here what follows from them is
assumed and said: the vocabulary, if neither the recipe nor its preset has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core import config as configs
from penstock.core.config import Raw
from penstock.core.errors import ConfigError
from penstock.models.presets import expanded
from penstock.parallel.layout import layout_of
from penstock.plan.memory import Memory
from penstock.train.config import TrainConfig, on_machines
from penstock.train.data_config import DataConfig
from penstock.train.derived import check_rows
from penstock.train.memory_plan import memory_plan
from penstock.train.recipe import check_sections

ASSUMED_VOCABULARY = 32_768
_USUAL_PER_MACHINE = 8
_USUAL_DEVICES = (1, 2, 8, 64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one of so many devices has of a run."""

    devices: int
    layout: str
    rows: int
    """Rows of a step that it works on, with those that it shares them with."""
    micro_rows: int
    """Rows of one forward pass."""
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """A recipe in numbers."""

    config: TrainConfig
    assumed: dict[str, Any]
    """Keys of the model that would follow from the corpora, and what was taken for them."""
    shares: tuple[Share, ...]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the first step."""
        return self.config.data.global_batch_size * self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the run, were every step like the first."""
        return self.tokens_per_step * self.config.run.steps


def plan_recipe(raw: Raw, *, devices: Sequence[int] = ()) -> RecipePlan:
    """Check a recipe and work out its shares.

    Args:
        raw: the values of its file.
        devices: numbers of devices; none: the usual ones that its layout and batch allow.

    Raises:
        ConfigError: the recipe is wrong, or does not fit a number of devices that was asked for.
    """
    config, assumed = config_of(raw)
    wanted = devices or [number for number in _USUAL_DEVICES if _allows(config, number)]
    return RecipePlan(config=config, assumed=assumed, shares=tuple(share_of(config, n) for n in wanted))


def config_of(raw: Raw) -> tuple[TrainConfig, dict[str, Any]]:
    """Build a recipe whose corpora need not be there.

    Returns:
        The recipe, and the keys of the model that would follow from the corpora, as they were assumed.

    Raises:
        ConfigError: the recipe is wrong.
    """
    check_sections(raw)
    model = expanded(raw.get("model", {}))
    data = configs.build(DataConfig, raw.get("data", {}), where="data")
    follows = {"vocab_size": ASSUMED_VOCABULARY, "max_position_embeddings": data.longest}
    assumed = {name: value for name, value in follows.items() if name not in model}
    return configs.build(TrainConfig, {**raw, "model": {**assumed, **model}}), assumed


def share_of(config: TrainConfig, devices: int) -> Share:
    """Return what one device has of a run.

    Raises:
        ConfigError: the layout or the batch does not divide over them.
    """
    config = on_machines(config, world_size=devices, ranks_per_machine=min(devices, _USUAL_PER_MACHINE))
    layout = layout_of(config.parallel, world_size=devices)
    micro_rows = check_rows(config, world_size=layout.num_data)
    return Share(
        devices=devices,
        layout=str(layout),
        rows=config.data.global_batch_size // layout.num_data,
        micro_rows=micro_rows,
        memory=memory_plan(config, layout),
    )


def _allows(config: TrainConfig, devices: int) -> bool:
    try:
        share_of(config, devices)
    except ConfigError:
        return False
    return True

"""Check a recipe for a number of devices without its corpora: parameters, layout, memory; no torch.

`penstock train --dry-run` reports more for a recipe whose corpora exist. Here the values that follow from
them are assumed, and reported: the vocabulary, unless the recipe or its preset has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core import config as configs
from penstock.core.config import Raw
from penstock.core.errors import ConfigError
from penstock.core.files import MANIFEST_FILE
from penstock.models.presets import expanded, preset_named
from penstock.parallel.layout import layout_of
from penstock.plan.memory import Memory
from penstock.train.planning.memory import memory_plan
from penstock.train.recipe.config import TrainConfig, on_machines
from penstock.train.recipe.data_config import DataConfig
from penstock.train.recipe.planned_changes import check_rows
from penstock.train.resolve.load import check_sections
from penstock.train.resolve.packing import with_packing, with_usual_packing
from penstock.train.resolve.run_length import with_steps
from penstock.train.resolve.start import OF_START, with_start
from penstock.train.resolve.usual_names import usual_names_explained

ASSUMED_VOCABULARY = 32_768
_USUAL_PER_MACHINE = 8
_USUAL_DEVICES = (1, 2, 8, 64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One device's share of a run."""

    devices: int
    layout: str
    rows: int
    """Rows of a step on this device and those that work on the same rows."""
    micro_rows: int
    """Rows of one forward pass."""
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """Derived numbers of a recipe."""

    config: TrainConfig
    assumed: dict[str, Any]
    """Model keys that would follow from the corpora, with the assumed values."""
    shares: tuple[RankShare, ...]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the first step."""
        return self.config.data.global_batch_size * self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the run, if every step were like the first; 0: unknown, its corpora are elsewhere."""
        return self.tokens_per_step * self.config.run.steps


def plan_recipe(raw: Raw, *, devices: Sequence[int] = ()) -> RecipePlan:
    """Check a recipe and compute each device's share.

    Args:
        raw: values of its file.
        devices: numbers of devices; empty: the usual numbers that layout and batch allow.

    Raises:
        ConfigError: the recipe is invalid, or does not fit one of `devices`.
    """
    config, assumed = config_of(raw)
    wanted = devices or [number for number in _USUAL_DEVICES if _allows(config, number)]
    return RecipePlan(config=config, assumed=assumed, shares=tuple(share_of(config, n) for n in wanted))


@usual_names_explained()
def config_of(raw: Raw) -> tuple[TrainConfig, dict[str, Any]]:
    """Build a recipe without its corpora; if they are here, packing and the steps of epochs follow from them.

    Returns:
        The recipe, and the assumed model keys that would follow from the corpora, or from a run.start_from
        that is not there.

    Raises:
        ConfigError: the recipe is invalid.
    """
    check_sections(raw)
    raw = with_usual_packing(raw)
    preset = _preset_of_missing_start(raw)
    raw = with_start(raw) if preset is None else {**raw, "model": {"preset": preset}}
    model = expanded(raw.get("model", {}))
    data = configs.build(DataConfig, raw.get("data", {}), where="data")
    if is_here := all((Path(path) / MANIFEST_FILE).is_file() for path in data.paths.values()):
        raw = with_packing(raw, data.paths)
    follows = {"vocab_size": ASSUMED_VOCABULARY, "max_position_embeddings": data.longest}
    assumed = {name: value for name, value in follows.items() if name not in model}
    config = configs.build(TrainConfig, {**raw, "model": {**assumed, **model}})
    if is_here:
        config = with_steps(config)
    return config, assumed if preset is None else {"preset": preset, **assumed}


def _preset_of_missing_start(raw: Raw) -> str | None:
    """Return the preset that a missing run.start_from is named after; None if it is there, or unknown.

    So a recipe can be planned before its model is downloaded: `./Qwen3-8B` has the shape of `qwen3-8b`.
    """
    run = raw.get("run")
    folder = run.get("start_from") if isinstance(run, dict) else None
    if (
        set(raw.get("model") or {}) - OF_START
        or not isinstance(folder, str)
        or not folder
        or Path(folder).exists()
    ):
        return None
    return preset_named(Path(folder).name)


def share_of(config: TrainConfig, devices: int) -> RankShare:
    """Return one device's share of a run.

    Raises:
        ConfigError: layout or batch do not divide over the devices.
    """
    config = on_machines(config, world_size=devices, ranks_per_machine=min(devices, _USUAL_PER_MACHINE))
    layout = layout_of(config.parallel, world_size=devices)
    micro_rows = check_rows(config, world_size=layout.num_data)
    return RankShare(
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

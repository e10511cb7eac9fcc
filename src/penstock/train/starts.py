"""Resolved recipes of all starts of a run, and their differences.

    RUN/config.json                       the recipe of the newest start
    RUN/starts/0002-step-00000400.json    the recipe of the second start, at step 400

Resolved recipes are compared, so a changed default of a newer Penstock shows too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core import config
from penstock.core.errors import PenstockError
from penstock.core.files import write_json
from penstock.core.toml import Changes, differences
from penstock.obs.metric_names import RECIPE_FILE, STARTS_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRecipe:
    """The stored recipe of a start."""

    file: str
    """Path relative to the run's folder."""
    changes: Changes
    """Differences from the previous start; empty for the first."""


def keep_recipe(folder: Path, recipe: Mapping[str, Any], *, step: int) -> KeptRecipe:
    """Store the resolved recipe of a start.

    Args:
        step: steps taken before this start.
    """
    kept = sorted((folder / STARTS_FOLDER).glob("[0-9][0-9][0-9][0-9]-step-*.json"))
    before = _before(folder)
    number = 1 + max((int(file.name.partition("-")[0]) for file in kept), default=0)
    name = f"{STARTS_FOLDER}/{number:04d}-step-{step:08d}.json"
    (folder / STARTS_FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(folder / name, recipe)
    write_json(folder / RECIPE_FILE, recipe)
    return KeptRecipe(file=name, changes={} if before is None else differences(before, recipe))


def _before(folder: Path) -> Mapping[str, Any] | None:
    """Return the recipe of the previous start; None: there is none, or it cannot be read."""
    try:
        return config.load_json(folder / RECIPE_FILE)
    except (PenstockError, OSError):
        return None

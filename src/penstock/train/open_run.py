"""Open the data of a run from its folder, as it was, is and is planned to be; imports no torch.

The recipe that the run wrote down, the loader's state in its newest checkpoint, and what it took up from
outside since then say of every step, past or to come, what it holds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint.find import saved_of
from penstock.core import config
from penstock.core.errors import PenstockError, UsageError
from penstock.data import Loader
from penstock.obs.names import METRICS_FILE, RECIPE_FILE
from penstock.obs.sinks.jsonl import read_records
from penstock.train.config import TrainConfig
from penstock.train.requests import answers
from penstock.train.supply import train_loader
from penstock.train.take_up import follow


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run's data."""

    folder: Path
    recipe: TrainConfig
    loader: Loader
    """At the step of the newest checkpoint, with all ranks' rows; it knows what was decided since."""

    @property
    def steps(self) -> int:
        """Steps in the whole run."""
        return self.recipe.run.steps

    def steps_taken(self) -> int:
        """Return the steps that the run has logged; those after its newest checkpoint are counted."""
        last = 0
        for record in read_records(self.folder / METRICS_FILE):
            last = max(last, record["step"]) if "loss" in record else last
        return max(last, self.loader.step)

    def check_step(self, step: int) -> None:
        """Refuse a step, counted from 1, that no run can have.

        Raises:
            UsageError: with the steps there are.
        """
        if not 1 <= step <= self.steps:
            raise UsageError(f"The run has steps 1 to {self.steps:,}", got=step)


def open_run(folder: Path, **options: Any) -> OpenRun:
    """Open the data of a run.

    Args:
        options: of `Loader`, over those of the recipe.

    Raises:
        UsageError: the folder is not that of a run.
        PenstockError: a corpus or the newest checkpoint is damaged or gone.
    """
    if not (folder / RECIPE_FILE).is_file():
        state = f"holds no {RECIPE_FILE}" if folder.is_dir() else "is not a folder"
        raise UsageError(f"{folder} {state}", fix="Give the folder of a run (run.dir of its recipe).")
    try:
        recipe = config.build(TrainConfig, config.load_json(folder / RECIPE_FILE))
    except PenstockError as error:
        raise PenstockError(f"{folder / RECIPE_FILE} is damaged: {error}") from None
    settings = {"fields": ("input_ids",), "num_workers": 0, "deliver": "numpy", **options}
    loader = train_loader(recipe, rank=0, world_size=1, **settings)
    if saved := saved_of(folder):
        loader.load_state_dict(saved[-1].index().meta.loader)
    follow(loader, answers(folder))
    return OpenRun(folder=folder, recipe=recipe, loader=loader)

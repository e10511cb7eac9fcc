"""Open the data of a run from its folder: its past, present and planned mixture; no torch.

The run's resolved recipe, the loader's state in its newest checkpoint, and the control requests applied since
then determine the data of every step, past or future.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint.find import saved_of
from penstock.core import config
from penstock.core.errors import PenstockError, UsageError, damaged
from penstock.data import Loader
from penstock.obs.metric_names import METRICS_FILE, RECIPE_FILE
from penstock.obs.sinks.jsonl import read_records
from penstock.train.control.apply_request import follow, in_force
from penstock.train.control.requests import answers, job_is_running, open_requests
from penstock.train.data_setup import train_loader
from penstock.train.recipe.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """Recipe and loader of a run."""

    folder: Path
    recipe: TrainConfig
    loader: Loader
    """At the step of the newest checkpoint, with the rows of all ranks; later decisions are applied."""

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.recipe.run.steps

    def steps_taken(self) -> int:
        """Return the number of steps logged by the run, those after its newest checkpoint included."""
        last = 0
        for record in read_records(self.folder / METRICS_FILE):
            last = max(last, record["step"]) if "loss" in record else last
        return max(last, self.loader.step)

    def check_step(self, step: int) -> None:
        """Refuse a step, counted from 1, that the run does not have.

        Raises:
            UsageError: with the valid range.
        """
        if not 1 <= step <= self.steps:
            raise UsageError(f"The run has steps 1 to {self.steps:,}", got=step)


def recipe_of(folder: Path) -> TrainConfig:
    """Return the resolved recipe of a run.

    Raises:
        UsageError: the folder is not a run.
        PenstockError: its recipe is damaged.
    """
    if not (folder / RECIPE_FILE).is_file():
        state = f"holds no {RECIPE_FILE}" if folder.is_dir() else "is not a folder"
        raise UsageError(f"{folder} {state}", fix="Give the folder of a run (run.dir of its recipe).")
    try:
        return config.build(TrainConfig, config.load_json(folder / RECIPE_FILE))
    except PenstockError as error:
        raise PenstockError(
            damaged(folder / RECIPE_FILE, error),
            fix="Restore it, or resume the run, which writes it again.",
        ) from None


def open_run(folder: Path, **options: Any) -> OpenRun:
    """Open the data of a run.

    Args:
        options: arguments of `Loader` that override those of the recipe.

    Raises:
        UsageError: the folder is not a run.
        PenstockError: a corpus or the newest checkpoint is damaged or missing.
    """
    recipe = recipe_of(folder)
    settings = {"fields": ("input_ids",), "num_workers": 0, "deliver": "numpy", **options}
    loader = train_loader(recipe, rank=0, world_size=1, **settings)
    if saved := saved_of(folder):
        loader.load_state_dict(saved[-1].index().meta.loader, on_change="apply")
    follow(loader, answers(folder))
    return OpenRun(folder=folder, recipe=recipe, loader=loader)


View = dict[str, Any]  # Any: JSON values


def mixture_view(opened: OpenRun) -> View:
    """Return the present mixture, its history and waiting requests, as JSON values.

    Steps are counted as steps taken before something applies.
    """
    loader, step = opened.loader, opened.steps_taken()
    weights = in_force(loader, min(step, max(opened.steps - 1, 0)))
    samples, tokens = loader.samples_by_corpus(step), loader.tokens_by_corpus(step)
    since = [first for first, _, _ in loader.mixtures if first <= step][-1]
    before = loader.samples_by_corpus(since)
    served = {name: samples[name] - before.get(name, 0) for name in samples}
    total, epochs = sum(served.values()), loader.epochs_by_corpus(step)
    skips = [{"start": s, "stop": past, "reason": why} for s, past, why in loader.state_dict()["skip"]]
    return {
        "step": step,
        "steps": opened.steps,
        "running": job_is_running(opened.folder),
        "since": since,
        "corpora": {
            name: {
                "weight": round(weights.get(name, 0.0), 6),
                "share": round(served[name] / total, 6) if total else None,
                "tokens": tokens[name],
                "epochs": round(epochs[name], 6),
            }
            for name in samples
        },
        "mixtures": [
            {"after_step": first, "weights": {n: round(w, 6) for n, w in mix.items()}, "reason": reason}
            for first, mix, reason in loader.mixtures
        ],
        "skips": skips,
        "answers": [asdict(found) for found in answers(opened.folder)],
        "waiting": open_requests(opened.folder),
    }

"""Weights & Biases sink, by its own client: one run there per run folder here."""

import hashlib
from pathlib import Path
from typing import Any, Self

from penstock.core.errors import PenstockError
from penstock.obs.sinks import Record
from penstock.obs.sinks.tensorboard import scalars


class WeightsAndBiases:
    """Sink of a W&B run; use as a context manager.

    A resumed run continues the same W&B run. WANDB_MODE=offline keeps everything on disk.

    Args:
        folder: run folder; its name is the W&B run's name.
        config: the resolved recipe, shown with the run.

    Raises:
        PenstockError: the client is not installed.
    """

    def __init__(self, folder: Path, *, project: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise PenstockError(
                "measure.wandb_project needs the package wandb, which is not installed",
                fix='pip install wandb, or leave measure.wandb_project "".',
            ) from None
        place = str(folder.resolve())
        key = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        self._run = wandb.init(
            project=project, name=folder.resolve().name, id=key, resume="allow", dir=place, config=config
        )

    def __call__(self, record: Record) -> None:
        """Send one record."""
        if record.get("event") != "start":
            self._run.log(scalars(record), step=record["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

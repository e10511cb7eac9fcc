"""Where checkpoints are and what each says about itself; imports no torch.

    RUN/checkpoints/step-00001200/   tensors in safetensors files, one or more a rank
                    step-00001200/checkpoint.json   step, model, loader state: written last

A checkpoint is built under a temporary name and renamed, so a folder with the final name is complete.
Nothing in it is a pickle: opening a checkpoint cannot run code.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core import config
from penstock.core.errors import CheckpointError, PenstockError
from penstock.models.llama.config import LlamaConfig

FOLDER = "checkpoints"
META_FILE = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a checkpoint is a checkpoint of."""

    version: int = 1
    """Layout of the checkpoint."""
    step: int
    """Optimizer steps taken."""
    tokens: int
    """Tokens trained on."""
    model: LlamaConfig
    """The network."""
    loader: dict[str, Any]
    """State of the loader: JSON values."""
    adaptive: dict[str, Any] = field(default_factory=dict)
    """Memory of what sets the mixture by the losses: JSON values; empty where nothing does."""
    seed: int
    """Of the run; keys every random choice, so no generator state is saved."""
    world_size: int
    """Ranks that wrote it. Any number may read it."""


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / FOLDER / f"step-{step:08d}"


def complete(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    root = run / FOLDER
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and (path / META_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))  # names grow beyond 8 digits


def read_meta(checkpoint: Path) -> Meta:
    """Read what a checkpoint says about itself.

    Raises:
        CheckpointError: it is no checkpoint, or a damaged one.
    """
    try:
        return config.build(Meta, config.load_json(checkpoint / META_FILE))
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} has no {META_FILE}", fix="Give a checkpoint or run folder."
        ) from None
    except PenstockError as error:
        raise CheckpointError(
            f"{checkpoint / META_FILE} is damaged: {error}",
            fix="Remove that checkpoint to use the one before.",
        ) from None


def check_model(meta: Meta, model: LlamaConfig, *, checkpoint: Path) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: naming every size that differs.
    """
    saved, ours = config.dump(meta.model), config.dump(model)
    changes = [f"{name} was {saved[name]}, is {ours[name]}" for name in saved if saved[name] != ours[name]]
    if changes:
        raise CheckpointError(
            f"Checkpoint {checkpoint} is of another model: {'; '.join(changes)}",
            fix="Resume with the recipe it was saved with, or choose another run.dir.",
        )


def find(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest complete one of a run.

    Raises:
        CheckpointError: there is none.
    """
    if (path / META_FILE).is_file():
        return path
    if found := complete(path):
        return found[-1]
    state = "has no complete checkpoint" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {state}", fix="Give the folder of a run, a checkpoint or a model.")

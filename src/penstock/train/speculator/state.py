"""A tuning run on disk: one safetensors file with the heads, their moments and the step; no pickle."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from penstock.core.errors import CheckpointDamaged, StateMismatch
from penstock.core.files import write_atomic
from penstock.models.speculator import Speculator

_FILE = "state.safetensors"


def partial_folder(out: Path) -> Path:
    """Return where an unfinished run is kept."""
    return out.with_name(f"{out.name}.partial")


def save_state(
    out: Path,
    speculator: Speculator,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    settings: Mapping[str, Any],
) -> None:
    """Write a run so that `load_state` continues it; the file before stays until this one is whole."""
    folder = partial_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(speculator, optimizer)}
    metadata = {"step": str(step), "settings": json.dumps(settings, sort_keys=True)}
    write_atomic(folder / _FILE, save(tensors, metadata=metadata))


def load_state(
    out: Path, speculator: Speculator, optimizer: torch.optim.Optimizer, *, settings: Mapping[str, Any]
) -> int:
    """Fill heads and moments in place from an unfinished run; return the steps it took, 0 without one.

    Raises:
        StateMismatch: the run has other settings.
        CheckpointDamaged: the file is not what was written.
    """
    path = partial_folder(out) / _FILE
    if not path.is_file():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            _check(json.loads(metadata["settings"]), settings, out)
            with torch.no_grad():
                for name, tensor in _tensors(speculator, optimizer):
                    tensor.copy_(file.get_tensor(name))
            return int(metadata["step"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointDamaged(
            f"{path} is damaged: {error}", fix=f"Remove {path.parent} and start the run anew."
        ) from error


def _check(stored: Mapping[str, Any], given: Mapping[str, Any], out: Path) -> None:
    for name in sorted({*stored, *given}):
        if stored.get(name) != given.get(name):
            raise StateMismatch(
                f"The unfinished run in {partial_folder(out)} has {name} {stored.get(name)!r}",
                got=given.get(name),
                fix=f"Give the same, choose another folder, or remove {partial_folder(out)}.",
            )


def _tensors(speculator: Speculator, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in speculator.named_parameters():
        yield name, parameter.detach()
        for key, value in optimizer.state[parameter].items():
            yield f"optimizer.{name}.{key}", value

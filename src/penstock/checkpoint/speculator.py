"""Speculator folders: read and write `config.json` and safetensors, in IBM's format."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.checkpoint.hf import appearing, check_new, read_tensors, write_texts, write_weights
from penstock.checkpoint.weight_files import select, stored_tensors
from penstock.core.config import load_json
from penstock.core.errors import ConfigError
from penstock.models.speculator import MODEL_TYPE, Speculator, SpeculatorConfig, stored_names
from penstock.nn.unfilled import unfilled

_MAX_SHARD_BYTES = 5 * 10**9


def is_speculator(folder: Path) -> bool:
    """Return True if the folder's config names a speculator."""
    try:
        return load_json(folder / "config.json").get("model_type") == MODEL_TYPE
    except (OSError, ConfigError):
        return False


def load_speculator(folder: Path, *, dtype: torch.dtype | None = None) -> Speculator:
    """Open a folder; the speculator is in evaluation mode, on the CPU.

    Args:
        dtype: dtype of the weights; None: as stored.

    Raises:
        ModelError: weights are missing, of the wrong shape, damaged or pickled.
    """
    config = SpeculatorConfig.from_json(load_json(folder / "config.json"))
    with unfilled():
        speculator = Speculator(config)
    names = stored_names(config)
    shapes = {name: tuple(speculator.get_parameter(name).shape) for name in names}
    untied = SpeculatorConfig.from_json({**config.to_json(), "tie_weights": False})
    copies = set(stored_names(untied).values()) - set(names.values())  # some writers store shared ones again
    state = dict(read_tensors(select(folder, stored_tensors(folder), names, shapes, copies=copies)))
    speculator.load_state_dict(state, strict=False, assign=True)  # shared tensors have one name here
    assert not any(parameter.is_meta for parameter in speculator.parameters()), list(state)
    if dtype is not None:
        speculator.to(dtype)
    return speculator.eval()


def save_speculator(
    speculator: Speculator, folder: Path, *, extra_files: Mapping[str, str] | None = None
) -> None:
    """Write a folder that `load_speculator` opens; it appears whole or not at all.

    Args:
        folder: must not exist, or be empty.
        extra_files: text files to write beside, by name.

    Raises:
        UsageError: the folder is not empty.
        ModelError: it could not be written.
    """
    check_new(folder)
    config = speculator.config
    tensors = {theirs: speculator.get_parameter(ours).data for ours, theirs in stored_names(config).items()}
    texts = {"config.json": json.dumps(config.to_json(), indent=1) + "\n", **(extra_files or {})}
    with appearing(folder) as temporary:
        write_weights(temporary, tensors, dtype=None, max_shard_bytes=_MAX_SHARD_BYTES)
        write_texts(temporary, texts)

"""Hugging Face model folders, read and written: `config.json` and the weights (hf_weights.py).

A folder is written beside its final name and renamed, so it appears whole or not at all.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.checkpoint.hf_weights import read_weights, write_weights
from penstock.checkpoint.stored_type import type_of_most
from penstock.core.config import load_json
from penstock.core.errors import ConfigError, ModelError, UsageError
from penstock.core.files import commit, remove_tree, sync_directory, temporary_beside
from penstock.models import FAMILIES
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.config_json import config_json, config_of
from penstock.models.llama.model import Llama
from penstock.models.llama.slices import ALONE, Place, slice_of, sliced_config
from penstock.nn.unfilled import unfilled


def is_hugging_face(folder: Path) -> bool:
    """Whether the folder says which Hugging Face model it holds."""
    try:
        return "model_type" in load_json(folder / "config.json")
    except (OSError, ConfigError):
        return False


def read_config(folder: Path) -> LlamaConfig:
    """Read `config.json`.

    Raises:
        ModelError: no such file, or a model Penstock cannot build.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", fix="Give the folder of a Hugging Face model.")
    try:
        raw = load_json(path)
    except ConfigError as error:
        raise ModelError(str(error).removesuffix(".")) from None
    try:
        return config_of(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def load_pretrained(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    place: Place = ALONE,
) -> Llama:
    """Open a model folder; the model is in evaluation mode and remembers its `config`.

    Args:
        dtype: of the weights; None: as stored, or as most are.
        place: which part of each matrix is read; the model is then that part.

    Raises:
        ModelError: weights that are missing, unexpected, of the wrong shape, damaged or pickled.
    """
    whole = read_config(folder)
    family = FAMILIES[whole.model_type]
    names = family.hugging_face_names(whole)
    with unfilled():
        model: Llama = family(sliced_config(whole, place))
        stored = family(whole)
    shapes = {theirs: stored.get_parameter(ours).shape for ours, theirs in names.items()}
    slices = {theirs: slice_of(ours, whole, place) for ours, theirs in names.items()}
    read = dict(read_weights(folder, shapes, slices=slices))
    dtype = dtype or type_of_most(folder, read, shapes)
    state = {ours: read.pop(theirs).to(device, dtype) for ours, theirs in names.items()}
    model.load_state_dict(state, assign=True)
    return model.eval()


def save_pretrained(
    state: Mapping[str, Tensor],
    config: LlamaConfig,
    folder: Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    eos_id: int | None = None,
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Write a model folder that transformers, vLLM and `load_pretrained` open.

    Args:
        state: the whole model's `state_dict()`, unsharded, of any device.
        folder: must not exist, or be empty.
        max_shard_bytes: largest weight file; one tensor is never split.
        dtype: of the written weights; None: as they are.
        eos_id: token that ends an answer, for `generation_config.json`.
        extra_files: text files to write beside, by name (the tokenizer's); they win over ours.

    Raises:
        UsageError: the folder is not empty.
        ModelError: `state` is not that of `config`, or the folder could not be written (a full disk).
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists and is not empty", fix="Choose another folder.")
    names: dict[str, str] = FAMILIES[config.model_type].hugging_face_names(config)
    _check_state(set(state), set(names))
    tensors = {theirs: state[ours] for ours, theirs in names.items()}
    stored = next(iter(tensors.values())).dtype if dtype is None else dtype
    model = {**config_json(config), **_special(eos_id), "dtype": str(stored).removeprefix("torch.")}
    texts = {"config.json": _json(model), "generation_config.json": _json(_special(eos_id))}
    with appearing(folder) as temporary:
        write_weights(temporary, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
        for name, text in {**texts, **(extra_files or {})}.items():
            (temporary / name).write_text(text, encoding="utf-8")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Lend a temporary folder, then give it its name; after any failure nothing of it is left.

    Raises:
        ModelError: it could not be written (a full disk).
    """
    temporary = temporary_beside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(temporary)
        temporary.mkdir()
        yield temporary
        for path in temporary.iterdir():
            _sync(path)
        sync_directory(temporary)
        if folder.exists():
            folder.rmdir()
        commit(temporary, folder)
    except (SafetensorError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(
            f"{folder} could not be written ({reason})",
            fix="Free space, or choose a folder that has it and can be written; then run it again.",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_state(given: set[str], expected: set[str]) -> None:
    wrong = sorted(given ^ expected)
    if wrong:
        raise ModelError(f"The weights are not those of the config ({', '.join(wrong[:3])})", got=len(wrong))


def _special(eos_id: int | None) -> dict[str, Any]:
    # an absent key would be taken for Llama 2's ids 1 and 2
    return {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": None}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

"""Hugging Face model folders without their numbers: config, weight files, identity; no torch."""

import hashlib
import logging
import os
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

from penstock.checkpoint.stored_head import differs_from_embedding
from penstock.core.config import load_json
from penstock.core.errors import ConfigError, ModelError
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.hugging_face import config_of

log = logging.getLogger(__name__)

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def is_hugging_face(folder: Path) -> bool:
    """Return True if the folder's config names a Hugging Face model type."""
    try:
        return "model_type" in load_json(folder / "config.json")
    except (OSError, ConfigError):
        return False


def is_adapter(folder: Path) -> bool:
    """Return True if the folder is an adapter's, as PEFT writes it."""
    return (folder / ADAPTER_CONFIG).is_file() and not is_hugging_face(folder)


def read_config(folder: Path, *, ignored_keys: Collection[str] = ()) -> LlamaConfig:
    """Read `config.json`.

    Where it ties the output matrix to the embedding, and another output matrix is stored, the model is
    untied, with a warning.

    Args:
        ignored_keys: unknown keys to pass over, with a warning.

    Raises:
        ModelError: no such file, a model that Penstock does not support, or an unknown key.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", fix="Give the folder of a Hugging Face model.")
    try:
        raw = load_json(path)
    except ConfigError as error:
        raise ModelError(str(error).removesuffix(".")) from None
    try:
        config = config_of(raw, ignored_keys=ignored_keys)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    for key in config.ignored_keys:
        _warn_of_ignored(path, key)
    if config.tie_word_embeddings and differs_from_embedding(_weight_files(folder)):
        _warn_of_head(path)
        return replace(config, tie_word_embeddings=False)
    return config


@cache  # once for each folder, however often it is read
def _warn_of_ignored(path: Path, key: str) -> None:
    log.warning("%s: the key %s is ignored; if the model needs it, its results are wrong", path, key)


@cache
def _warn_of_head(path: Path) -> None:
    log.warning(
        "%s ties the output matrix to the embedding, but another lm_head.weight is stored: it is used", path
    )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that are there."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return list(names_in_index(index))
    return [single] if single.is_file() else []


def names_in_index(index: Path) -> dict[Path, set[str]]:
    """Return the tensor names stored in each file that an index names.

    Raises:
        ModelError: the index is damaged, or names a file that is missing in its folder.
    """
    files: dict[Path, set[str]] = {}
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map", fix="Download or export it again.")
    for name, file in weight_map.items():
        path = index.parent / str(file)
        if Path(str(file)).name != file or not path.is_file():
            fix = "Download the whole folder again."
            raise ModelError(f"{index} names a file that is missing in its folder", got=file, fix=fix)
        files.setdefault(path, set()).add(name)
    return files


def no_weights(folder: Path) -> ModelError:
    """Return the error for a folder without safetensors files."""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return ModelError(
            f"{folder} contains only pickled weights, and opening a pickle can run code",
            fix="Convert it with transformers: AutoModelForCausalLM.from_pretrained(a).save_pretrained(b).",
        )
    return ModelError(f"{folder} has no {SINGLE}", fix="Check that the folder is complete.")


_SAMPLES = 64
_SAMPLE_BYTES = 4096
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


def identity_of(folder: Path) -> str:
    """Return 32 hex digits that identify a model folder: a hash of its config, index and weight files.

    Of each weight file it covers the size, the header (names, shapes, dtypes) and 64 evenly spaced pieces of
    4 KiB, so that other weights of equal shapes differ; reading every byte would take minutes.

    Raises:
        ModelError: weights are missing, pickled, or no safetensors.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / CONFIG).read_bytes())
    files = [folder / SINGLE]
    if (index := folder / INDEX).is_file():
        digest.update(index.read_bytes())
        files = sorted(names_in_index(index))
    elif not files[0].is_file():
        raise no_weights(folder)
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = int.from_bytes(file.read(8), "little")
            if header > min(size - 8, _MOST_HEADER_BYTES):
                raise ModelError(
                    f"{path} is no safetensors file, or is damaged: its header would have {header:,} bytes",
                    got=f"a file of {size:,} bytes",
                    fix="Download the whole folder again.",
                )
            digest.update(f"{path.name} {size} {header} ".encode())
            digest.update(file.read(header))
            for sample in range(_SAMPLES):
                file.seek(8 + header + max(0, size - header - 8 - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()

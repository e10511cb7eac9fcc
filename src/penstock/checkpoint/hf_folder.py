"""Hugging Face model folders without their numbers: config and identity; no torch."""

import hashlib
import os
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

from penstock.checkpoint.stored_head import differs_from_embedding
from penstock.checkpoint.weight_files import INDEX, no_weights, read_header, weight_files
from penstock.core.config import load_json
from penstock.core.errors import ConfigError, ModelError
from penstock.core.log import EventLog
from penstock.models.decoder.config import DecoderConfig
from penstock.models.family.config_json import config_of

log = EventLog(__name__)

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"


def is_hugging_face(folder: Path) -> bool:
    """Return True if the folder's config names a Hugging Face model type."""
    try:
        return "model_type" in load_json(folder / "config.json")
    except (OSError, ConfigError):
        return False


def is_adapter(folder: Path) -> bool:
    """Return True if the folder is an adapter's, as PEFT writes it."""
    return (folder / ADAPTER_CONFIG).is_file() and not is_hugging_face(folder)


def read_config(folder: Path, *, ignored_keys: Collection[str] = ()) -> DecoderConfig:
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
    if config.model_type != (whole := str(raw.get("model_type"))):
        _warn_of_other_parts(path.absolute(), whole, config.model_type)
    for key in config.ignored_keys:
        _warn_of_ignored(path, key)
    if config.tie_word_embeddings and differs_from_embedding(weight_files(folder)):
        _warn_of_head(path)
        return replace(config, tie_word_embeddings=False)
    return config


@cache  # once for each folder, however often it is read
def _warn_of_ignored(path: Path, key: str) -> None:
    log.warning(
        "key_ignored",
        "{path}: the key {key} is ignored; if the model needs it, its results are wrong",
        path=path,
        key=key,
    )


@cache
def _warn_of_other_parts(path: Path, whole: str, part: str) -> None:
    log.warning(
        "text_part",
        "{path} is a {whole} model: its language model ({part}) is opened, its other parts are not",
        path=path,
        whole=whole,
        part=part,
    )


@cache
def _warn_of_head(path: Path) -> None:
    log.warning(
        "head_differs",
        "{path} ties the output matrix to the embedding, but stores another lm_head.weight, which is used",
        path=path,
    )


_SAMPLES = 64
_SAMPLE_BYTES = 4096


def identity_of(folder: Path) -> str:
    """Return 32 hex digits that identify a model folder: a hash of its config, index and weight files.

    Of each weight file it covers the size, the header (names, shapes, dtypes) and 64 evenly spaced pieces of
    4 KiB, so that other weights of equal shapes differ; reading every byte would take minutes.

    Raises:
        ModelError: weights are missing, pickled, or no safetensors.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / CONFIG).read_bytes())
    files = weight_files(folder)
    if not files:
        raise no_weights(folder)
    if (index := folder / INDEX).is_file():
        digest.update(index.read_bytes())
    for path in files:
        with path.open("rb") as file:
            header = read_header(file, path)
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} {len(header)} ".encode())
            digest.update(header)
            first = 8 + len(header)
            for sample in range(_SAMPLES):
                file.seek(first + max(0, size - first - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()

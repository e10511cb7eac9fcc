"""Hugging Face model folders, read and written: `config.json` and safetensors, one file or sharded.

Pickled weights (`pytorch_model.bin`) are refused, because opening a pickle runs its author's code.
A folder is written beside its final name and renamed, so it appears whole or not at all.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.core.config import load_json
from penstock.core.errors import ConfigError, ModelError, UsageError, nearest
from penstock.core.files import commit, remove_tree, sync_directory, temporary_beside
from penstock.models import CONFIGS, FAMILIES
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.model import Llama
from penstock.models.llama.slices import ALONE, Place, Slice, slice_of, sliced_config
from penstock.nn.unfilled import unfilled

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NOT_LEARNED = ".rotary_emb.inv_freq"  # tables that transformers saved until 2023
_TIED_COPY = "lm_head.weight"


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
    model_type = str(raw.get("model_type"))
    if model_type not in CONFIGS:
        hint = nearest(model_type, list(CONFIGS))
        raise ModelError(f"{path}: models of this type cannot be opened", got=model_type, fix=hint)
    config: LlamaConfig = CONFIGS[model_type].from_hugging_face(raw)
    return config


def load_pretrained(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    place: Place = ALONE,
) -> Llama:
    """Open a model folder; the model is in evaluation mode and remembers its `config`.

    Args:
        dtype: of the weights; None: as stored.
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
    read = {name: tensor.to(device, dtype) for name, tensor in read_weights(folder, shapes, slices=slices)}
    model.load_state_dict({ours: read[theirs] for ours, theirs in names.items()}, assign=True)
    return model.eval()


def read_weights(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    *,
    copies: Collection[str] = (),
    slices: Mapping[str, Slice | None] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder by name.

    Args:
        shapes: of those that must be there.
        copies: names that may be there too and are not read.
        slices: the rows or columns to read, by name; others are read whole.

    Raises:
        ModelError: weights that are missing, unexpected, of the wrong shape, damaged or pickled.
    """
    files = _files(folder)
    _check_names(folder, {name for names in files.values() for name in names}, set(shapes), copies)
    for path, names in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names & set(shapes):
                    stored = tuple(file.get_slice(name).get_shape())
                    if stored != shapes[name]:
                        raise ModelError(
                            f"{name} in {path} has shape {stored}, but config.json "
                            f"makes it {tuple(shapes[name])}"
                        )
                    yield name, read_slice(file, name, slices.get(name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged: {error}", fix="Download or export it again.") from error


def read_slice(file: Any, name: str, part: Slice | None) -> Tensor:  # Any: safetensors has no types
    """Read some rows or columns of a tensor of an open safetensors file; the rest is not read.

    Args:
        part: None: the whole tensor.
    """
    if part is None:
        whole: Tensor = file.get_tensor(name)  # mapped, not copied
        return whole
    dim, run = part
    stored = file.get_slice(name)
    tensor: Tensor = stored[run.start : run.stop] if dim == 0 else stored[:, run.start : run.stop]
    return tensor


def _check_names(folder: Path, stored: set[str], expected: set[str], copies: Collection[str]) -> None:
    ignored = {name for name in stored if name.endswith(_NOT_LEARNED)} | set(copies)
    if _TIED_COPY not in expected:
        ignored.add(_TIED_COPY)  # some writers store a tied matrix twice
    missing, unexpected = sorted(expected - stored), sorted(stored - expected - ignored)
    problems = [
        f"{label}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for label, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise ModelError(
            f"The weights in {folder} are not those of its config.json ({'; '.join(problems)})",
            fix="Check that the folder is complete and that config.json belongs to it.",
        )


def _files(folder: Path) -> dict[Path, set[str]]:
    """Return the tensor names stored in each safetensors file."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        return _indexed(index)
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as file:
                return {single: set(file.keys())}
        except SafetensorError as error:
            raise ModelError(f"{single} is damaged: {error}", fix="Download or export it again.") from error
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(
            f"{folder} holds pickled weights only, and opening a pickle can run code",
            fix="Convert it with transformers: AutoModelForCausalLM.from_pretrained(a).save_pretrained(b).",
        )
    raise ModelError(f"{folder} has no {_SINGLE}", fix="Check that the folder is complete.")


def _indexed(index: Path) -> dict[Path, set[str]]:
    files: dict[Path, set[str]] = {}
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map", fix="Download or export it again.")
    for name, file in weight_map.items():
        path = index.parent / str(file)
        if Path(str(file)).name != file or not path.is_file():
            raise ModelError(f"{index} names a file that is not beside it", got=file)
        files.setdefault(path, set()).add(name)
    return files


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
    model = {**config.to_hugging_face(), **_special(eos_id), "dtype": str(stored).removeprefix("torch.")}
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


def write_weights(
    folder: Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    """Write safetensors, and an index where they are several; one tensor is never split."""
    shards: list[list[str]] = [[]]
    used = total = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * (tensor.dtype if dtype is None else dtype).itemsize
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used, total = used + size, total + size
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_file(content, folder / file, metadata={"format": "pt"})  # transformers asks for the format
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        (folder / _INDEX).write_text(
            _json({"metadata": {"total_size": total}, "weight_map": weight_map}), encoding="utf-8"
        )


def _special(eos_id: int | None) -> dict[str, Any]:
    # an absent key would be taken for Llama 2's ids 1 and 2
    return {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": None}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

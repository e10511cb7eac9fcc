"""The weights of a Hugging Face folder: safetensors, one file or several with an index, read and written.

A tensor of one name is read whole or in part; what is not asked for is not read. Pickled weights
(`pytorch_model.bin`) are refused, because opening a pickle runs its author's code.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.core.config import load_json
from penstock.core.errors import ModelError
from penstock.models.llama.slices import Slice

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NOT_LEARNED = ".rotary_emb.inv_freq"  # tables that transformers saved until 2023
_TIED_COPY = "lm_head.weight"


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
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


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
            fix = "Download the whole folder again."
            raise ModelError(f"{index} names a file that is not beside it", got=file, fix=fix)
        files.setdefault(path, set()).add(name)
    return files

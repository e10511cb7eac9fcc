"""Hugging Face model folders: read and write `config.json`, safetensors, and the weights' dtype.

A folder is written beside its final name and renamed, so it appears whole or not at all.

A tensor is read whole or in part; other parts are not read. Pickled weights (`pytorch_model.bin`) are
refused, because opening a pickle runs its author's code.

Some writers keep norms, or the output matrix, in float32 beside bfloat16 matrices. A network computes in one
dtype: that of most of its numbers, which `config.json` then names too.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.checkpoint.hf_folder import read_config
from penstock.checkpoint.tensors import DTYPES
from penstock.checkpoint.weight_files import (
    INDEX,
    SINGLE,
    StoredTensor,
    by_file,
    damaged,
    model_tensors,
)
from penstock.core.errors import ModelError, UsageError
from penstock.core.files import commit, remove_tree, sync_directory, temporary_beside
from penstock.core.packages import Package
from penstock.models import FAMILIES
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import ALONE, Slice, TensorParallelRank, slice_of, sliced_config
from penstock.models.family.config_json import config_json
from penstock.models.family.tensors import StoredRows
from penstock.nn.unfilled import unfilled

if TYPE_CHECKING:
    import safetensors
    import safetensors.torch as safetensors_torch
else:
    safetensors = Package("safetensors", "Hugging Face folders")
    safetensors_torch = Package("safetensors.torch", "Hugging Face folders")


def load_pretrained(
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    place: TensorParallelRank = ALONE,
    ignored_keys: Collection[str] = (),
    may_lack_head: bool = False,
) -> Decoder:
    """Open a model folder; the model is in evaluation mode and has its `config`.

    Args:
        dtype: dtype of the weights; None: that of most stored numbers.
        place: part of each matrix to read; the model is then that part.
        ignored_keys: unknown keys of config.json to pass over, with a warning.
        may_lack_head: True to open an untied model without a stored output matrix; its `unembed` is None, and
            its logits mean nothing.

    Raises:
        ModelError: config.json has an unknown key; weights are missing, unexpected, of the wrong shape,
            damaged or pickled.
    """
    folder = Path(folder)
    whole = read_config(folder, ignored_keys=ignored_keys)
    tensors = model_tensors(folder, whole, may_lack_head=may_lack_head)
    with unfilled():
        model: Decoder = FAMILIES[whole.model_type](sliced_config(whole, place))
    if "unembed.weight" not in tensors:
        model.unembed = None
    dtype = dtype or type_of_most(tensors)
    read = read_tensors(tensors, slices={name: slice_of(name, whole, place) for name in tensors})
    model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in read}, assign=True)
    return model.eval()


def save_pretrained(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    folder: Path | str,
    *,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    eos_id: int | list[int] | None = None,
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Write a model folder that transformers, vLLM and `load_pretrained` can open.

    Args:
        state: the whole model's `state_dict()`, unsharded, on any device.
        folder: must not exist, or be empty.
        max_shard_bytes: maximum size of a weight file; one tensor is never split.
        dtype: dtype of the written weights; None: unchanged.
        eos_id: token that ends an answer, or several, for `generation_config.json`.
        extra_files: text files to add, by name (the tokenizer's); they replace ours.

    Raises:
        UsageError: the folder is not empty.
        ModelError: `state` does not match `config`, or the folder could not be written (a full disk).
    """
    folder = Path(folder)
    check_new(folder)
    layout = config.stored_rows
    _check_state(set(state), set(layout))
    tensors = StoredState(state, layout)
    stored = next(iter(state.values())).dtype if dtype is None else dtype
    model = {**_special(eos_id), **config_json(config), "dtype": str(stored).removeprefix("torch.")}
    texts = {"config.json": _json(model), "generation_config.json": _json(_special(eos_id))}
    with appearing(folder) as temporary:
        write_weights(temporary, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
        write_texts(temporary, {**texts, **(extra_files or {})})


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write text files by name, into the folder or one below it."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def check_new(folder: Path) -> None:
    """Refuse a folder that has files.

    Raises:
        UsageError: the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists and is not empty", fix="Choose another folder.")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, then rename it to its final name; after a failure nothing is left.

    Raises:
        ModelError: it could not be written (a full disk).
    """
    temporary = temporary_beside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(temporary)
        temporary.mkdir()
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        sync_directory(temporary)
        if folder.exists():
            folder.rmdir()
        commit(temporary, folder)
    except (safetensors.SafetensorError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(
            f"{folder} could not be written ({reason})",
            fix="Free disk space, or choose a writable folder with enough; then run it again.",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_state(given: set[str], expected: set[str]) -> None:
    wrong = sorted(given ^ expected)
    if wrong:
        raise ModelError(
            f"The weights do not match the config ({', '.join(wrong[:3])})",
            got=len(wrong),
            fix="Take config.json and the weights from one download of the model.",
        )


def _special(eos_id: int | list[int] | None) -> dict[str, Any]:
    # without the key, readers assume Llama 2's ids 1 and 2
    return {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": None}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_tensors(
    tensors: Mapping[str, StoredTensor], *, slices: Mapping[str, Slice | None] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers of tensors by name, file by file.

    Args:
        tensors: by any names.
        slices: rows or columns to read, by the same names; other tensors are read whole.

    Raises:
        ModelError: a file is damaged.
    """
    for path, names in by_file(tensors, tensors).items():
        with open_weights(path) as file:
            for name in names:
                tensor = tensors[name]
                yield name, read_slice(file, tensor.name, slices.get(name), rows=tensor.rows)


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:  # Any: safetensors has no types
    """Open a safetensors file.

    Raises:
        ModelError: it is damaged.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (safetensors.SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def read_slice(
    file: Any,  # Any: safetensors has no types
    name: str,
    part: Slice | None,
    *,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Read some rows or columns of a tensor of an open safetensors file; see `read_rows`.

    Args:
        part: rows or columns of the parameter; None: all.
        rows: rows of the stored tensor that are the parameter; None: all.
    """
    if part is None and rows is None:
        whole: Tensor = file.get_tensor(name)  # mapped, not copied
        return whole
    if rows is None:
        rows = range(file.get_slice(name).get_shape()[0])
    dim, run = (0, range(len(rows))) if part is None else part
    if dim == 0:
        return read_rows(file, name, rows[run.start : run.stop])
    return read_rows(file, name, rows, slice(run.start, run.stop))


def read_rows(file: Any, name: str, rows: Sequence[int], *inner: slice) -> Tensor:  # Any: as above
    """Read rows of a tensor of an open safetensors file, in this order, and slices of its other dims.

    Of scattered rows, all between the first and the last are read.
    """
    stored = file.get_slice(name)
    if isinstance(rows, range) and rows.step == 1:
        run: Tensor = stored[(slice(rows.start, rows.stop), *inner)]
        return run
    first, last = min(rows), max(rows)
    between: Tensor = stored[(slice(first, last + 1), *inner)]
    return between[torch.tensor(rows) - first]


class StoredState(Mapping[str, Tensor]):
    """Parameters of a network as the tensors of a model folder, each put together when it is asked for.

    Args:
        state: parameters by name.
        layout: where each is stored, by the same names.
    """

    def __init__(self, state: Mapping[str, Tensor], layout: Mapping[str, StoredRows]) -> None:
        self._state, self._parts = state, dict[str, list[tuple[str, StoredRows]]]()
        for name, rows in layout.items():
            self._parts.setdefault(rows.tensor, []).append((name, rows))

    def __getitem__(self, stored: str) -> Tensor:
        parts = self._parts[stored]
        (name, rows), *others = parts
        like = self._state[name]
        if rows.is_whole and not others:
            return like
        tensor = like.new_empty(rows.num_rows, *like.shape[1:])
        for name, rows in parts:
            tensor[torch.tensor(rows.rows, device=like.device)] = self._state[name].detach()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def write_weights(
    folder: Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    """Write safetensors files, and an index if there are several; one tensor is never split."""
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
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        safetensors_torch.save_file(
            content, folder / file, metadata={"format": "pt"}
        )  # transformers requires the format entry
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def type_of_most(tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """Return the dtype of most numbers."""
    numbers = Counter[str]()
    for tensor in tensors.values():
        numbers[tensor.dtype] += tensor.num_elements
    return DTYPES[numbers.most_common(1)[0][0]]

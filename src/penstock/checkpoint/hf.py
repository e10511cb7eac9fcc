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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.checkpoint.hf_folder import INDEX, SINGLE, names_in_index, no_weights, read_config
from penstock.checkpoint.stored_head import HEAD
from penstock.core.errors import ModelError, UsageError
from penstock.core.files import commit, remove_tree, sync_directory, temporary_beside
from penstock.core.packages import Package
from penstock.models import FAMILIES
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.hugging_face import config_json
from penstock.models.llama.model import Llama
from penstock.models.llama.tensor_slices import ALONE, Slice, TensorParallelRank, slice_of, sliced_config
from penstock.nn.unfilled import unfilled

if TYPE_CHECKING:
    import safetensors
else:
    safetensors = Package("safetensors", "Hugging Face folders")
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
) -> Llama:
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
    family = FAMILIES[whole.model_type]
    present = {name for names in files_of(folder).values() for name in names}
    names = stored_names(whole, present)
    with unfilled():
        model: Llama = family(sliced_config(whole, place))
        stored = family(whole)
    if may_lack_head and model.unembed is not None and HEAD not in present:
        model.unembed = None
        del names["unembed.weight"]
    shapes = {theirs: stored.get_parameter(ours).shape for ours, theirs in names.items()}
    slices = {theirs: slice_of(ours, whole, place) for ours, theirs in names.items()}
    read = dict(read_weights(folder, shapes, slices=slices))
    dtype = dtype or type_of_most(folder, read, shapes)
    state = {ours: read.pop(theirs).to(device, dtype) for ours, theirs in names.items()}
    model.load_state_dict(state, assign=True)
    return model.eval()


def stored_names(config: LlamaConfig, stored: Collection[str]) -> dict[str, str]:
    """Return Penstock's name -> name in a folder of every tensor.

    `AutoModel` saves a model without its output matrix, and its names without the prefix `model.`. Of a tied
    model either of the two matrices may be stored.

    Args:
        stored: names of the folder's tensors.
    """
    names: dict[str, str] = FAMILIES[config.model_type].hugging_face_names(config)
    if not any(name.startswith(_PREFIX) for name in stored):
        names = {ours: theirs.removeprefix(_PREFIX) for ours, theirs in names.items()}
    if config.tie_word_embeddings and names["embed.weight"] not in stored and HEAD in stored:
        names["embed.weight"] = HEAD
    return names


def save_pretrained(
    state: Mapping[str, Tensor],
    config: LlamaConfig,
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
    names: dict[str, str] = FAMILIES[config.model_type].hugging_face_names(config)
    _check_state(set(state), set(names))
    tensors = {theirs: state[ours] for ours, theirs in names.items()}
    stored = next(iter(tensors.values())).dtype if dtype is None else dtype
    model = {**config_json(config), **_special(eos_id), "dtype": str(stored).removeprefix("torch.")}
    texts = {"config.json": _json(model), "generation_config.json": _json(_special(eos_id))}
    with appearing(folder) as temporary:
        write_weights(temporary, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
        for name, text in {**texts, **(extra_files or {})}.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text(text, encoding="utf-8")


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


_RESTORE = "Take config.json and the weights from one download of the model."


def _check_state(given: set[str], expected: set[str]) -> None:
    wrong = sorted(given ^ expected)
    if wrong:
        raise ModelError(
            f"The weights do not match the config ({', '.join(wrong[:3])})", got=len(wrong), fix=_RESTORE
        )


def _special(eos_id: int | list[int] | None) -> dict[str, Any]:
    # without the key, readers assume Llama 2's ids 1 and 2
    return {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": None}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


_NOT_LEARNED = ".rotary_emb.inv_freq"  # tables that transformers saved until 2023
_PREFIX = "model."


def read_weights(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    *,
    copies: Collection[str] = (),
    slices: Mapping[str, Slice | None] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder by name.

    Args:
        shapes: shapes of the required tensors.
        copies: names that may be present and are not read.
        slices: rows or columns to read, by name; other tensors are read whole.

    Raises:
        ModelError: weights are missing, unexpected, of the wrong shape, damaged or pickled.
    """
    files = files_of(folder)
    check_names(folder, {name for names in files.values() for name in names}, set(shapes), copies)
    for path, names in files.items():
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in names & set(shapes):
                    stored = tuple(file.get_slice(name).get_shape())
                    if stored != shapes[name]:
                        raise ModelError(
                            f"{name} in {path} has shape {stored}, but config.json "
                            f"makes it {tuple(shapes[name])}",
                            fix=_RESTORE,
                        )
                    yield name, read_slice(file, name, slices.get(name))
        except (safetensors.SafetensorError, OSError) as error:
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


def check_names(folder: Path, stored: set[str], expected: set[str], copies: Collection[str] = ()) -> None:
    """Refuse a folder that lacks tensors of the model, or has others.

    Args:
        copies: names that may be present and are not read.

    Raises:
        ModelError: the message names them.
    """
    ignored = {name for name in stored if name.endswith(_NOT_LEARNED)} | set(copies)
    if HEAD not in expected:
        ignored.add(HEAD)  # some writers store a tied matrix twice
    if expected - stored == {HEAD}:
        raise ModelError(
            f"{folder} has no output matrix: config.json does not tie it to the embedding, and no {HEAD} is "
            "stored",
            fix="Add the file that has it. transformers draws one at random. If the model was trained with "
            "tied matrices, set tie_word_embeddings to true in config.json.",
        )
    missing, unexpected = sorted(expected - stored), sorted(stored - expected - ignored)
    problems = [
        f"{label}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for label, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise ModelError(
            f"The weights in {folder} do not match its config.json ({'; '.join(problems)})",
            fix="Check that the folder is complete and that config.json belongs to it.",
        )


def files_of(folder: Path) -> dict[Path, set[str]]:
    """Return the tensor names stored in each safetensors file.

    Raises:
        ModelError: weights are missing, damaged, pickled or another user's.
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        found = names_in_index(index)
        for path in found:
            _check_readable(path)
        return found
    if not single.is_file():
        raise no_weights(folder)
    _check_readable(single)
    try:
        with safetensors.safe_open(single, framework="pt") as file:
            return {single: set(file.keys())}
    except safetensors.SafetensorError as error:
        raise ModelError(f"{single} is damaged: {error}", fix="Download or export it again.") from error


def _check_readable(path: Path) -> None:
    """Refuse a file of another user, which safetensors says does not exist."""
    if path.is_file() and not os.access(path, os.R_OK):
        raise ModelError(f"{path} may not be read by this user", fix="Let others read it: chmod a+r.")


COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def type_of_most(
    folder: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> torch.dtype:
    """Return the dtype of most numbers.

    Args:
        tensors: whole tensors, or a rank's part of each.
        shapes: shapes of the whole tensors, so that all ranks agree.

    Raises:
        ModelError: some are stored in a dtype that requires a scale.
    """
    numbers = Counter[torch.dtype]()
    for name, tensor in tensors.items():
        check_dtype(folder, name, tensor)
        numbers[tensor.dtype] += shapes[name].numel()
    return numbers.most_common(1)[0][0]


def check_dtype(folder: Path, name: str, tensor: Tensor) -> None:
    """Refuse a tensor stored in a dtype that requires a scale.

    Raises:
        ModelError: the message names it.
    """
    if tensor.dtype not in COMPUTED:
        raise ModelError(
            f"{name} in {folder} is quantised, and nothing says how",
            got=str(tensor.dtype).removeprefix("torch."),
            fix="Use the model's bf16 or fp32 folder.",
        )

"""Weight files of a model folder: the tensors that their headers list, held against the config; no torch.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: name, dtype, shape
and place of every tensor) and the numbers. Only headers are read here, so a folder that does not fit its
config is refused in milliseconds, whatever its size.
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from penstock.core.config import load_json
from penstock.core.errors import ModelError
from penstock.models.decoder.config import DecoderConfig
from penstock.models.family.tensors import StoredRows

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"

COMPUTED = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that can be opened, as safetensors writes them."""
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
_NOT_LEARNED = ".rotary_emb.inv_freq"  # tables that transformers saved until 2023
_PREFIX = "model."
_TEXT_PARTS = {"language_model.": "", "model.language_model.": _PREFIX, "model.text_model.": _PREFIX}
"""Prefix of the language model's tensors in a model that has other parts -> what takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a safetensors file, or some of its rows."""

    file: Path
    name: str
    """Its name in the file."""
    dtype: str
    """As safetensors writes it: BF16."""
    shape: tuple[int, ...]
    start: int
    """Byte of the file where its numbers begin."""
    rows: Sequence[int] | None = None
    """Rows of it that a parameter of the network is, in order; None: all."""

    @property
    def num_elements(self) -> int:
        """Number of the parameter's elements."""
        if self.rows is None:
            return math.prod(self.shape)
        return len(self.rows) * math.prod(self.shape[1:])


def model_tensors(
    folder: Path, config: DecoderConfig, *, may_lack_head: bool = False
) -> dict[str, StoredTensor]:
    """Return the tensors of a model folder by Penstock's names, in model order.

    Args:
        config: that of the folder.
        may_lack_head: True to accept an untied model without a stored output matrix.

    Raises:
        ModelError: weights are missing, unexpected, of another shape, quantised, damaged or pickled.
    """
    stored = text_tensors(stored_tensors(folder))
    layout = _stored_rows(config, stored)
    if may_lack_head and HEAD not in stored:
        layout.pop("unembed.weight", None)
    names = {ours: rows.tensor for ours, rows in layout.items()}
    shapes = {
        ours: (layout[ours].num_rows, *shape[1:])
        for ours, shape in config.parameter_shapes.items()
        if ours in layout
    }
    selected = select(folder, stored, names, shapes)
    return {
        ours: tensor if layout[ours].is_whole else replace(tensor, rows=layout[ours].rows)
        for ours, tensor in selected.items()
    }


def text_tensors(stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return the tensors of a language model, by the names that they have when it stands alone.

    A model that also reads images or audio stores them under a prefix, beside the tensors of its other parts.

    Args:
        stored: all tensors of a folder, by name.
    """
    for prefix, inner in _TEXT_PARTS.items():
        if any(name.startswith(prefix) for name in stored):
            named = {
                f"{inner}{name.removeprefix(prefix)}": name for name in stored if name.startswith(prefix)
            }
            if HEAD in stored:
                named.setdefault(HEAD, HEAD)
            return {name: stored[theirs] for name, theirs in named.items()}
    return stored


def _stored_rows(config: DecoderConfig, stored: Collection[str]) -> dict[str, StoredRows]:
    """Return where each parameter lies in the folder, by Penstock's names.

    `AutoModel` saves a model without its output matrix, and its names without the prefix `model.`. Of a tied
    model either of the two matrices may be stored.

    Args:
        stored: names of the folder's tensors.
    """
    layout = config.stored_rows
    if not any(name.startswith(_PREFIX) for name in stored):
        layout = {
            ours: replace(rows, tensor=rows.tensor.removeprefix(_PREFIX)) for ours, rows in layout.items()
        }
    if config.tie_word_embeddings and layout["embed.weight"].tensor not in stored and HEAD in stored:
        layout["embed.weight"] = replace(layout["embed.weight"], tensor=HEAD)
    return layout


def select(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    copies: Collection[str] = (),
) -> dict[str, StoredTensor]:
    """Return the tensors of a model by Penstock's names; refuse a folder that has other ones.

    Args:
        stored: all tensors of the folder, by name.
        names: Penstock's name -> name in the folder.
        shapes: by Penstock's names.
        copies: names that may be present and are not read.

    Raises:
        ModelError: tensors are missing, unexpected, of another shape or quantised.
    """
    _check_names(folder, set(stored), set(names.values()), copies)
    selected = {ours: stored[theirs] for ours, theirs in names.items()}
    for ours, tensor in selected.items():
        if tensor.dtype not in COMPUTED:
            raise ModelError(
                f"{tensor.name} in {folder} is quantised, and nothing says how",
                got=tensor.dtype,
                fix="Use the model's bfloat16 or float32 folder.",
            )
        if tensor.shape != shapes[ours]:
            raise ModelError(
                f"{tensor.name} in {tensor.file} has shape {tensor.shape}, but config.json makes it "
                f"{shapes[ours]}",
                fix="Take config.json and the weights from one download of the model.",
            )
    return selected


def _check_names(folder: Path, stored: set[str], expected: set[str], copies: Collection[str]) -> None:
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


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, by name.

    Raises:
        ModelError: weights are missing, damaged, pickled or another user's.
    """
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise no_weights(folder)
        return tensors_of(single)
    stored: dict[str, StoredTensor] = {}
    for path, names in names_in_index(index).items():
        found = tensors_of(path)
        if absent := sorted(names - found.keys()):
            raise ModelError(
                f"{index} names {absent[0]} in {path.name}, which does not have it",
                got=f"{len(absent)} of {len(names)} tensors are absent",
                fix="Download the whole folder again.",
            )
        stored |= {name: found[name] for name in names}
    return stored


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; empty: it has none.

    Raises:
        ModelError: the index is damaged, or names a file that is missing in its folder.
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return sorted(names_in_index(index))
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


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by name.

    Raises:
        ModelError: it is damaged, or another user's.
    """
    if not os.access(path, os.R_OK):
        raise ModelError(f"{path} may not be read by this user", fix="Let others read it: chmod a+r.")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw = read_header(file, path)
    first = 8 + len(raw)
    try:
        header: dict[str, Any] = json.loads(raw)  # Any: JSON
        header.pop("__metadata__", None)
        found = {name: _stored(path, name, entry, first=first) for name, entry in header.items()}
        end = first + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path, f"its header is malformed ({type(error).__name__})") from error
    if end != size:
        raise damaged(path, f"it has {size:,} bytes, and its header describes {end:,}")
    return found


def _stored(path: Path, name: str, entry: Mapping[str, Any], *, first: int) -> StoredTensor:  # Any: JSON
    """Return the tensor that an entry of a header describes.

    Raises:
        ValueError, TypeError, KeyError: it is malformed.
    """
    start, past = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (*shape, start, past)):
        raise ValueError(name)
    if (past - start) * 8 != math.prod(shape) * _BITS[entry["dtype"]]:
        raise ValueError(name)
    return StoredTensor(file=path, name=name, dtype=entry["dtype"], shape=shape, start=first + start)


def read_header(file: BinaryIO, path: Path) -> bytes:
    """Read the header of a safetensors file that was opened at its beginning.

    Raises:
        ModelError: it does not fit into the file.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise damaged(
            path, f"its header would have {length:,} bytes, and it has {size:,}; or it is no safetensors file"
        )
    return file.read(length)


def damaged(path: Path, reason: object) -> ModelError:
    """Return the error for a damaged file of weights."""
    return ModelError(f"{path} is damaged: {reason}", fix="Download or export the folder again.")


def by_file(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[Path, list[str]]:
    """Return the names of tensors by file, so that each file is opened once."""
    files: dict[Path, list[str]] = {}
    for name in names:
        files.setdefault(tensors[name].file, []).append(name)
    return files

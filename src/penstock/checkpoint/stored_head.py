"""Comparison of a folder's output matrix with its embedding; no torch.

Some writers store a tied output matrix a second time. Other folders hold an output matrix of their own
although config.json ties it to the embedding. transformers uses that matrix, and so does Penstock.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")
"""Names of the embedding: of a causal model, and of a model that was saved without its output matrix."""

_CHUNK = 2**22
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def differs_from_embedding(files: Iterable[Path]) -> bool:
    """Return True if the stored output matrix and the stored embedding differ.

    The matrices are compared number by number. Files that cannot be read are left to whoever opens them.

    Args:
        files: the folder's safetensors files.
    """
    try:
        return _differs(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))
    except (OSError, ValueError, KeyError, TypeError):  # a damaged file, which opening it names
        return False


@cache  # a command reads the config of a folder several times
def _differs(files: tuple[tuple[Path, int, int], ...]) -> bool:
    found = {name: entry for path, _, _ in files for name, entry in _entries(path)}
    head = found.get(HEAD)
    embedding = next((found[name] for name in EMBEDDINGS if name in found), None)
    if head is None or embedding is None:
        return False
    (_, one, _), (_, other, _) = head, embedding
    if one["shape"] != other["shape"] or (
        one["dtype"] != other["dtype"] and not _TYPES.keys() >= {one["dtype"], other["dtype"]}
    ):
        return True
    chunks = zip(_chunks(*head), _chunks(*embedding), strict=True)
    return not all(np.array_equal(ours, theirs, equal_nan=True) for ours, theirs in chunks)


_Entry = tuple[Path, Mapping[str, Any], int]  # Any: JSON
"""File, the tensor's entry in its header, and where its bytes begin."""


def _entries(path: Path) -> Iterator[tuple[str, _Entry]]:
    """Yield the tensors of a safetensors file: a JSON header after its length, then their bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} has no header")
        header = json.loads(file.read(length))
    for name in (HEAD, *EMBEDDINGS):
        if name in header:
            yield name, (path, header[name], 8 + length + header[name]["data_offsets"][0])


def _chunks(path: Path, entry: Mapping[str, Any], start: int) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's numbers, some at a time; of a dtype that NumPy lacks, their bytes."""
    kind = _TYPES.get(entry["dtype"], "<u1")
    first, past = entry["data_offsets"]
    count = math.prod(entry["shape"]) if entry["dtype"] in _TYPES else past - first
    stored = np.memmap(path, kind, "r", start, (count,))
    for at in range(0, count, _CHUNK):
        part = stored[at : at + _CHUNK]
        if entry["dtype"] == "BF16":  # the upper half of a float32
            yield (part.astype(np.uint32) << 16).view(np.float32)
        else:
            yield np.asarray(part)

"""Comparison of a folder's output matrix with its embedding; no torch.

Some writers store a tied output matrix a second time. Other folders hold an output matrix of their own
although config.json ties it to the embedding. transformers uses that matrix, and so does Penstock.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.weight_files import HEAD, StoredTensor, tensors_of, text_tensors
from penstock.core.errors import ModelError

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
    except (OSError, ModelError):  # a damaged file, which opening it names
        return False


@cache  # a command reads the config of a folder several times
def _differs(files: tuple[tuple[Path, int, int], ...]) -> bool:
    found = text_tensors({name: tensor for path, _, _ in files for name, tensor in tensors_of(path).items()})
    head = found.get(HEAD)
    embedding = next((found[name] for name in EMBEDDINGS if name in found), None)
    if head is None or embedding is None:
        return False
    if head.shape != embedding.shape or not _TYPES.keys() >= {head.dtype, embedding.dtype}:
        return True  # whoever opens the folder then checks the matrix
    chunks = zip(_chunks(head), _chunks(embedding), strict=True)
    return not all(np.array_equal(ours, theirs, equal_nan=True) for ours, theirs in chunks)


def _chunks(tensor: StoredTensor) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's numbers, some at a time."""
    stored = np.memmap(tensor.file, _TYPES[tensor.dtype], "r", tensor.start, (tensor.num_elements,))
    for at in range(0, tensor.num_elements, _CHUNK):
        part = stored[at : at + _CHUNK]
        if tensor.dtype == "BF16":  # the upper half of a float32
            yield (part.astype(np.uint32) << 16).view(np.float32)
        else:
            yield np.asarray(part)

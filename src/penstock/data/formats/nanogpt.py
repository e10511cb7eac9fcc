"""nanoGPT's `.bin` files: uint16 tokens and nothing else; and those of llm.c and modded-nanogpt.

The latter begin with 256 int32: a mark, a version, the number of tokens, zeros
(github.com/karpathy/llm.c, dev/data/data_common.py). nanoGPT stores a token after each document,
llm.c before each: hence the two options.
"""

import re
from collections.abc import Mapping

import numpy as np

from penstock.core.errors import CorpusError
from penstock.data.formats import Options
from penstock.data.formats.choice import one_split
from penstock.data.formats.flat import SEPARATORS, FlatShard, flat_shard, separator
from penstock.data.formats.stored import dtype_option, little, served, whole_items
from penstock.data.storage import Blob, Storage

OPTIONS = {**SEPARATORS, "dtype": "type of a stored token where the file has no header; uint16 if not given"}

_SPLIT = re.compile(r"(?:^|[_./-])(train|val|valid|validation|test)(?=[_./-])")
_HEADER_BYTES = 256 * 4
_MARKS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}


def open_shard(storage: Storage, name: str, options: Options) -> FlatShard:
    """Open a file of tokens.

    Raises:
        CorpusError: it is missing or truncated, or its header is not one that is known.
        UsageError: no option says where documents end.
    """
    blob = storage.open(name)
    cut = separator(options, name=blob.name)
    headed = _header(blob)
    if headed:
        dtype, count = headed
        offset = _HEADER_BYTES
    else:
        dtype, offset = dtype_option(options, default="uint16", name=blob.name), 0
        count = whole_items(blob.size, dtype, name=blob.name)
    tokens = served(blob.array(little(dtype), offset=offset, count=count), dtype, name=blob.name)
    return flat_shard(storage, (name,), tokens=tokens, cut=cut, how=f"nanogpt {dtype} {offset}")


def find(sizes: Mapping[str, int]) -> list[str]:
    """Return the `.bin` files that have no Megatron index beside them, of the split for training."""
    splits: dict[str, list[str]] = {}
    for name in sizes:
        if name.endswith(".bin") and f"{name[:-4]}.idx" not in sizes:
            word = _SPLIT.search(name)
            splits.setdefault(word[1] if word else "", []).append(name)
    return one_split(splits)


def companions(name: str) -> tuple[str, ...]:  # noqa: ARG001 - every format is asked
    """Return nothing: a shard is one file."""
    return ()


def _header(blob: Blob) -> tuple[str, int] | None:
    """Return the type and number of tokens that a header says; None where there is no header."""
    if blob.size < _HEADER_BYTES:
        return None
    mark, version, count = np.frombuffer(blob.read(0, 12), "<i4").tolist()
    if mark not in {known for known, _ in _MARKS}:
        return None
    if (mark, version) not in _MARKS:
        raise CorpusError(f"{blob.name} has a header of version {version}, which is not known")
    dtype = _MARKS[mark, version]
    held = whole_items(blob.size - _HEADER_BYTES, dtype, name=blob.name)
    if held != count:
        raise CorpusError(
            f"{blob.name} holds {held:,} tokens, its header says {count:,}",
            fix="It is truncated or altered: restore it or make it again.",
        )
    return dtype, count

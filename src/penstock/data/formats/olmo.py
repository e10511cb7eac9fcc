"""OLMo's token files: `.npy` by name, mostly tokens without any header.

Documents come from the metadata beside a file, `part.csv.gz` of `part.npy` with the start and end of
each document, which is right even where a document was cut and lost its end token; without it, from the
end token (github.com/allenai/OLMo-core, olmo_core/data/utils.py, iter_document_indices). A file that
has a real `.npy` header is read by that.
"""

import gzip
import io
import re
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from penstock.core.errors import CorpusError
from penstock.data.formats import Options
from penstock.data.formats.flat import SEPARATORS, FlatShard, flat_shard, separator
from penstock.data.formats.sidecar import Chunks, documents_of
from penstock.data.formats.stored import dtype_option, little, served, whole_items
from penstock.data.storage import Absent, Blob, Storage
from penstock.data.types import Int64

OPTIONS = {
    "eos_id": SEPARATORS["eos_id"],
    "dtype": "type of a stored token: uint16 or uint32, which the files do not say",
}

_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '[<|]([ui][1248])', 'fortran_order': (?:False|True), 'shape': \((\d{1,18}),\), \}\s*"
)
_LINE_BYTES = 2**16
_ROWS = 2**16  # documents read at a time


def open_shard(storage: Storage, name: str, options: Options) -> FlatShard:
    """Open a file of tokens.

    Raises:
        CorpusError: it is missing or truncated, or its header or metadata are damaged.
        UsageError: no option says the type of its tokens, or where documents end.
    """
    blob = storage.open(name)
    dtype, offset, count = _header(blob) or _headless(blob, options)
    tokens = served(blob.array(little(dtype), offset=offset, count=count), dtype, name=blob.name)
    (metadata,) = companions(name)
    try:
        listed = storage.open(metadata)
    except Absent:
        cut, how = separator(options, name=blob.name), f"olmo {dtype} {offset}"
        return flat_shard(storage, (name,), tokens=tokens, cut=cut, how=how)
    found = documents_of(
        storage,
        (name, metadata),
        how=f"olmo metadata {dtype} {offset}",
        num_tokens=count,
        find=lambda: _listed(listed, count),
    )
    return FlatShard(tokens, found, None)


def find(sizes: Mapping[str, int]) -> list[str]:
    """Return the `.npy` files."""
    return [name for name in sizes if name.endswith(".npy")]


def companions(name: str) -> tuple[str, ...]:
    """Return the name of the metadata of a file.

    >>> companions("web/part-0.npy")
    ('web/part-0.csv.gz',)
    """
    return (f"{name.removesuffix('.npy')}.csv.gz",)


def _header(blob: Blob) -> tuple[str, int, int] | None:
    """Return type, offset and number of tokens that a real `.npy` header says; None where there is none."""
    begin = blob.read(0, min(12, blob.size))
    if not begin.startswith(_MAGIC):
        return None
    wide = len(begin) == 12 and begin[6] > 1  # from version 2 the header's length has four bytes
    start = 12 if wide else 10
    offset = start + int.from_bytes(begin[8:start], "little")
    match = _HEADER.fullmatch(blob.read(start, offset)) if offset <= min(blob.size, _LINE_BYTES) else None
    if match is None:
        raise CorpusError(
            f"{blob.name} has a .npy header that is not one of a flat array of integers",
            fix="Save it as one row of uint16 or uint32.",
        )
    dtype, count = np.dtype(match[1].decode()).name, int(match[2])
    if whole_items(blob.size - offset, dtype, name=blob.name) != count:
        raise CorpusError(
            f"{blob.name} does not hold the {count:,} tokens that its header says",
            fix="It is truncated or altered: restore it or make it again.",
        )
    return dtype, offset, count


def _headless(blob: Blob, options: Options) -> tuple[str, int, int]:
    dtype = dtype_option(options, default=None, name=blob.name)
    return dtype, 0, whole_items(blob.size, dtype, name=blob.name)


def _listed(metadata: Blob, num_tokens: int) -> Chunks:
    """Yield the document ends that a metadata file lists.

    Raises:
        CorpusError: it is damaged, or its documents are not the tokens, one after the other.
    """
    position = 0
    ends: list[int] = []
    for start, stop in _rows(metadata):
        if start != position or not start < stop <= num_tokens:
            raise CorpusError(
                f"{metadata.name} lists a document of tokens {start:,} to {stop:,} after token {position:,} "
                f"of {num_tokens:,}",
                fix="It belongs to another file: restore it, or remove it and give eos_id.",
            )
        position = stop
        ends.append(stop)
        if len(ends) == _ROWS:
            yield _array(ends), -1
            ends = []
    yield _array(ends), -1


def _array(ends: list[int]) -> Int64:
    return np.array(ends, np.int64)


def _rows(metadata: Blob) -> Iterator[tuple[int, int]]:
    """Yield the first two columns; the others say where a document came from."""
    try:
        with metadata.path().open("rb") as file, gzip.open(file) as plain:
            lines = io.BufferedReader(plain)
            while line := lines.readline(_LINE_BYTES):
                start, stop = line.split(b",", 2)[:2]
                yield _number(start), _number(stop)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise CorpusError(
            f"{metadata.name} cannot be read as documents' starts and ends: {error}",
            fix="Restore it, or remove it and give eos_id.",
        ) from None


def _number(text: bytes) -> int:
    text = text.strip()
    if not (text.isdigit() and len(text) < 19):
        raise ValueError(f"{text[:40]!r} is no position")
    return int(text)

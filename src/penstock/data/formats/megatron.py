"""Megatron-LM's `.bin` and `.idx`: tokens end to end, and an index of sequences and documents.

The index: `MMIDIDX\\0\\0`, version 1 (uint64), a code for the type of a token (uint8), the number of
sequences n and of document marks m (uint64), then int32 lengths [n], int64 byte offsets [n] and int64
document marks [m], which are sequence numbers from 0 to n: a document may have several sequences
(github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py; codes 9 and 10 are those of
its forks). Nothing in it is aligned. Megatron-LM's own GPT dataset takes each sequence for a document;
here the document marks count, which is the same unless data was split into sentences.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.errors import CorpusError
from penstock.data.formats import Options, Tokens
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.stored import little, served
from penstock.data.storage import Blob, Slices, Storage
from penstock.data.types import Int64

OPTIONS: Mapping[str, str] = {}

DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
    9: "uint32",
    10: "uint64",
}
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 2**20


class MegatronShard:
    """One `.bin` with its `.idx`, read in place."""

    def __init__(self, index: "_Index", stored: Slices, *, dtype: str, bin_name: str) -> None:
        self.tokens = served(stored, dtype, name=bin_name)
        self.num_tokens = len(stored)
        self.num_documents = len(index)
        self.document_ends = DocumentEnds(index, num_tokens=self.num_tokens, name=index.name).between
        self._index = index

    def recheck(self) -> Iterator[str]:
        """Say where the lengths of sequences are not the distances of their offsets."""
        yield from self._index.recheck()


@dataclass(frozen=True, slots=True)
class _Index:
    """The ends of documents in tokens, computed from what the index stores, slice by slice."""

    name: str
    lengths: Slices
    offsets: Slices
    marks: Slices
    bin_bytes: int
    itemsize: int

    def __len__(self) -> int:
        return len(self.marks) - 1

    def __getitem__(self, part: slice, /) -> Int64:
        first, past, _ = part.indices(len(self))
        if first >= past:
            return np.zeros(0, np.int64)
        marks = np.asarray(self.marks[first + 1 : past + 1])
        low, high, total = int(marks[0]), int(marks[-1]), len(self.lengths)
        if not 0 <= low <= high <= total or (marks[1:] < marks[:-1]).any():
            raise self.damaged("document marks that do not rise")
        offsets = np.append(self.offsets[low : high + 1], np.int64(self.bin_bytes))
        found: Int64 = offsets[marks - low] // self.itemsize
        return found

    def recheck(self) -> Iterator[str]:
        expected = 0
        for start in range(0, len(self.lengths), _CHUNK):
            lengths = self.lengths[start : start + _CHUNK].astype(np.int64)
            stops = expected + np.cumsum(lengths) * self.itemsize
            if (lengths < 0).any() or (
                self.offsets[start : start + _CHUNK] != stops - lengths * self.itemsize
            ).any():
                yield "its index has sequences that do not follow one another"
                return
            expected = int(stops[-1])
        if expected != self.bin_bytes:
            yield f"its sequences end at byte {expected:,} of {self.bin_bytes:,}"

    def damaged(self, what: str) -> CorpusError:
        return CorpusError(
            f"{self.name} has {what}",
            fix="It is truncated or altered: restore it or make it again.",
        )


def open_shard(storage: Storage, name: str, options: Options) -> MegatronShard:  # noqa: ARG001
    """Open a `.bin` and the `.idx` beside it.

    Raises:
        CorpusError: one of them is missing, truncated, or not of this format; or they do not fit together.
    """
    tokens, (index_name,) = storage.open(name), companions(name)
    blob = storage.open(index_name)
    dtype, sequences, marks = _header(blob)
    at = HEADER.size
    lengths = blob.array("<i4", offset=at, count=sequences)
    offsets = blob.array("<i8", offset=at + 4 * sequences, count=sequences)
    document_marks = blob.array("<i8", offset=at + 12 * sequences, count=marks)
    itemsize = np.dtype(dtype).itemsize
    index = _Index(blob.name, lengths, offsets, document_marks, tokens.size, itemsize)
    end = int(offsets[sequences - 1 : sequences][0]) if sequences else 0
    end += int(lengths[sequences - 1 : sequences][0]) * itemsize if sequences else 0
    if end != tokens.size or tokens.size % itemsize:
        raise CorpusError(
            f"{tokens.name} has {tokens.size:,} bytes, its index says {end:,}",
            fix="One of them is truncated or belongs to another: restore them or make them again.",
        )
    if not marks or document_marks[0:1][0] != 0 or document_marks[marks - 1 : marks][0] != sequences:
        raise index.damaged(f"document marks that do not run from 0 to its {sequences:,} sequences")
    stored = tokens.array(little(dtype), offset=0, count=tokens.size // itemsize)
    return MegatronShard(index, stored, dtype=dtype, bin_name=tokens.name)


def find(sizes: Mapping[str, int]) -> list[str]:
    """Return the `.bin` files that have an index beside them."""
    return [name for name in sizes if name.endswith(".bin") and companions(name)[0] in sizes]


def companions(name: str) -> tuple[str, ...]:
    """Return the name of a shard's index.

    >>> companions("web/part_text_document.bin")
    ('web/part_text_document.idx',)
    """
    return (f"{name.removesuffix('.bin')}.idx",)


def _header(blob: Blob) -> tuple[str, int, int]:
    """Return the type of a token and the numbers of sequences and document marks."""
    if blob.size < HEADER.size:
        raise CorpusError(f"{blob.name} is too short for an index", fix="Restore it or make it again.")
    magic, version, code, sequences, marks = HEADER.unpack(blob.read(0, HEADER.size))
    if (magic, version) != (MAGIC, 1):
        raise CorpusError(f"{blob.name} is no Megatron index of version 1")
    dtype = DTYPES.get(code, f"type {code}")
    if code not in DTYPES or dtype.startswith("float"):
        raise CorpusError(f"{blob.name} is of tokens stored as {dtype}, which are no token ids")
    return dtype, sequences, marks


def write_shard(path: Path, tokens: Tokens, offsets: Int64) -> None:
    """Write a `.bin` and the `.idx` beside it, each document one sequence. Not atomic: the caller renames.

    Args:
        path: of the `.bin`.
        tokens: [n] uint16 or uint32; the latter are stored as int32, the widest that Megatron-LM makes.
        offsets: [documents + 1] int64, rising from 0 to n.

    Raises:
        CorpusError: a token id or a document's length does not fit int32.
    """
    dtype, code = ("<u2", 8) if tokens.dtype == np.uint16 else ("<i4", 4)
    lengths = np.diff(offsets)
    for start in range(0, len(tokens), _CHUNK):
        if int(tokens[start : start + _CHUNK].max()) >= 2**31:
            raise CorpusError("Megatron-LM has no type for token ids of 2**31 and more")
    if len(lengths) and int(lengths.max()) >= 2**31:
        raise CorpusError("Megatron-LM has no documents of 2**31 tokens and more", got=int(lengths.max()))
    with path.open("wb") as file:
        for start in range(0, len(tokens), _CHUNK):
            file.write(tokens[start : start + _CHUNK].astype(dtype, copy=False).tobytes())
    with path.with_name(companions(path.name)[0]).open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(offsets)))
        file.write(lengths.astype("<i4").tobytes())
        file.write((offsets[:-1] * np.dtype(dtype).itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(offsets), dtype="<i8").tobytes())

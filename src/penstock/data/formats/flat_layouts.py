"""Token files of other tools, one layout each: Megatron-LM, datatrove, OLMo, nanoGPT.

    layout     tokens   beside them                  type of a token        ends of documents
    megatron   .bin     .idx                         code in the index      index of sequences and marks
    datatrove  .ds      .ds.index, .ds.metadata      metadata, or the sizes uint64 in the index
    olmo       .npy     .csv.gz                      option, or npy header  listed in .csv.gz, or a separator
    nanogpt    .bin     -                            option, or header      a separator

Sources: github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py;
github.com/huggingface/datatrove, datatrove/pipeline/tokens/tokenizer.py; github.com/allenai/OLMo-core,
olmo_core/data/utils.py, iter_document_indices; github.com/karpathy/llm.c, dev/data/data_common.py.
"""

import gzip
import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.core.arrays import Int64, Tokens
from penstock.core.errors import CorpusError
from penstock.data.formats import Format, Options, StoredShard
from penstock.data.formats.choice import one_split
from penstock.data.formats.flat import SEPARATORS, Chunks, kept_ends, separated_shard, separator
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.stored import dtype_option, little, served, whole_items
from penstock.storage.base import Absent, Blob, Slices, Storage

_CHUNK = 2**20


class _Head(NamedTuple):
    """Position and type of the tokens of a file."""

    dtype: str
    """One of stored.INTEGERS."""
    offset: int
    """Byte of the first token."""
    num_tokens: int

    def tokens(self, blob: Blob) -> Slices:
        stored = blob.array(little(self.dtype), offset=self.offset, count=self.num_tokens)
        return served(stored, self.dtype, name=blob.name)


# Megatron-LM. The index: `MMIDIDX\0\0`, version 1 (uint64), a code for the type of a token (uint8), the
# number of sequences n and of document marks m (uint64), then int32 lengths [n], int64 byte offsets [n] and
# int64 document marks [m], which are sequence numbers from 0 to n: a document may have several sequences.
# Nothing in it is aligned. Megatron-LM's own GPT dataset takes each sequence for a document; here the
# document marks count, which is the same unless data was split into sentences.

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {  # codes 9 and 10 are those of forks
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


@dataclass(frozen=True, slots=True)
class _MegatronIndex:
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
        """Say where the lengths of sequences are not the distances of their offsets."""
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


def _megatron(storage: Storage, name: str, options: Options) -> StoredShard:  # noqa: ARG001
    tokens, blob = storage.open(name), storage.open(f"{name.removesuffix('.bin')}.idx")
    dtype, sequences, marks = _megatron_header(blob)
    at = HEADER.size
    lengths = blob.array("<i4", offset=at, count=sequences)
    offsets = blob.array("<i8", offset=at + 4 * sequences, count=sequences)
    document_marks = blob.array("<i8", offset=at + 12 * sequences, count=marks)
    itemsize = np.dtype(dtype).itemsize
    index = _MegatronIndex(blob.name, lengths, offsets, document_marks, tokens.size, itemsize)
    end = int(offsets[sequences - 1 : sequences][0]) if sequences else 0
    end += int(lengths[sequences - 1 : sequences][0]) * itemsize if sequences else 0
    if end != tokens.size or tokens.size % itemsize:
        raise CorpusError(
            f"{tokens.name} has {tokens.size:,} bytes, its index says {end:,}",
            fix="One of them is truncated or belongs to another: restore them or make them again.",
        )
    if not marks or document_marks[0:1][0] != 0 or document_marks[marks - 1 : marks][0] != sequences:
        raise index.damaged(f"document marks that do not run from 0 to its {sequences:,} sequences")
    ids = _Head(dtype, 0, tokens.size // itemsize).tokens(tokens)
    ends = DocumentEnds(index, num_tokens=len(ids), name=index.name)
    return StoredShard(ids, len(ends), ends.between, recheck=index.recheck)


def _megatron_header(blob: Blob) -> tuple[str, int, int]:
    """Return the type of a token and the numbers of sequences and document marks."""
    if blob.size < HEADER.size:
        raise CorpusError(f"{blob.name} is too short for an index", fix="Restore it or make it again.")
    magic, version, code, sequences, marks = HEADER.unpack(blob.read(0, HEADER.size))
    if (magic, version) != (MAGIC, 1):
        raise CorpusError(
            f"{blob.name} is no Megatron index of version 1",
            fix="Restore it, or write it with Megatron-LM's preprocess_data.py.",
        )
    dtype = _DTYPES.get(code, f"type {code}")
    if code not in _DTYPES or dtype.startswith("float"):
        raise CorpusError(
            f"{blob.name} is of tokens stored as {dtype}, which are no token ids",
            fix="Give the .idx of a corpus of tokens.",
        )
    return dtype, sequences, marks


def write_megatron(path: Path, tokens: Tokens, offsets: Int64) -> None:
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
    with path.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(offsets)))
        file.write(lengths.astype("<i4").tobytes())
        file.write((offsets[:-1] * np.dtype(dtype).itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(offsets), dtype="<i8").tobytes())


# datatrove, which nanotron trains on. The tokens are uint16 or uint32 without any header; the index holds
# the end of each document as uint64; the metadata, if it was kept, has a first line that ends in the bytes
# of a token.

_METADATA_BYTES = 2**16


def _datatrove(storage: Storage, name: str, options: Options) -> StoredShard:  # noqa: ARG001
    blob, index = storage.open(name), storage.open(f"{name}.index")
    count = whole_items(index.size, "uint64", name=index.name)
    ends = index.array("<i8", offset=0, count=count)  # uint64 of 2**63 would be no position either
    num_tokens = int(ends[count - 1 : count][0]) if count else 0
    size = _datatrove_token_bytes(storage, name) or (4 if blob.size == 4 * num_tokens != 0 else 2)
    if blob.size != size * num_tokens:
        raise CorpusError(
            f"{blob.name} has {blob.size:,} bytes, its index ends at token {num_tokens:,}",
            fix="One of them is truncated or belongs to another: restore them or make them again.",
        )
    tokens = blob.array(f"<u{size}", offset=0, count=num_tokens)
    return StoredShard(tokens, count, DocumentEnds(ends, num_tokens=num_tokens, name=index.name).between)


def _datatrove_token_bytes(storage: Storage, name: str) -> int | None:
    """Return the bytes of a token as the metadata says them; None where it does not."""
    try:
        metadata = storage.open(f"{name}.metadata")
    except Absent:
        return None
    first = metadata.read(0, min(metadata.size, _METADATA_BYTES)).split(b"\n", 1)[0]
    _, _, size = first.rpartition(b"|")
    return int(size) if size in (b"2", b"4") else None


# OLMo: `.npy` by name, mostly tokens without any header; a file that has a real `.npy` header is read by
# that. The metadata beside a file has the start and end of each document, which is right even where a
# document was cut and lost its end token; without it, documents are found from that token.

_NPY_MAGIC = b"\x93NUMPY"
_NPY_HEADER = re.compile(
    rb"\{'descr': '[<|]([ui][1248])', 'fortran_order': (?:False|True), 'shape': \((\d{1,18}),\), \}\s*"
)
_LINE_BYTES = 2**16
_ROWS = 2**16  # documents read at a time


def _olmo(storage: Storage, name: str, options: Options) -> StoredShard:
    blob, metadata = storage.open(name), f"{name.removesuffix('.npy')}.csv.gz"
    head = _npy_header(blob) or _headless(blob, options, default=None)
    tokens, how = head.tokens(blob), f"{head.dtype} {head.offset}"
    try:
        listed = storage.open(metadata)
    except Absent:
        cut = separator(options, name=blob.name)
        return separated_shard(storage, name, tokens, cut, how=f"olmo {how}")
    ends, _ = kept_ends(
        storage,
        (name, metadata),
        how=f"olmo metadata {how}",
        num_tokens=head.num_tokens,
        find=lambda: _listed_ends(listed, head.num_tokens),
    )
    return StoredShard(tokens, len(ends), ends.between)


def _npy_header(blob: Blob) -> _Head | None:
    """Return what a real `.npy` header says; None where there is none."""
    begin = blob.read(0, min(12, blob.size))
    if not begin.startswith(_NPY_MAGIC):
        return None
    wide = len(begin) == 12 and begin[6] > 1  # from version 2 the header's length has four bytes
    start = 12 if wide else 10
    offset = start + int.from_bytes(begin[8:start], "little")
    match = _NPY_HEADER.fullmatch(blob.read(start, offset)) if offset <= min(blob.size, _LINE_BYTES) else None
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
    return _Head(dtype, offset, count)


def _headless(blob: Blob, options: Options, *, default: str | None) -> _Head:
    """Return what the size of a file without a header, and its user, say."""
    dtype = dtype_option(options, default=default, name=blob.name)
    return _Head(dtype, 0, whole_items(blob.size, dtype, name=blob.name))


def _listed_ends(metadata: Blob, num_tokens: int) -> Chunks:
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
            yield np.array(ends, np.int64), -1
            ends = []
    yield np.array(ends, np.int64), -1


def _rows(metadata: Blob) -> Iterator[tuple[int, int]]:
    """Yield the first two columns; the others say where a document came from."""
    try:
        if not metadata.size:
            raise EOFError("it is empty")  # which gzip takes for an empty list
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


# nanoGPT's files are uint16 tokens and nothing else. Those of llm.c and modded-nanogpt begin with 256
# int32: a mark, a version, the number of tokens, zeros. nanoGPT stores a token after each document, llm.c
# before each: hence the two options.

_SPLIT = re.compile(r"(?:^|[_./-])(train|val|valid|validation|test)(?=[_./-])")
_HEADER_BYTES = 256 * 4
_MARKS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}


def _nanogpt(storage: Storage, name: str, options: Options) -> StoredShard:
    blob = storage.open(name)
    cut = separator(options, name=blob.name)
    head = _nanogpt_header(blob) or _headless(blob, options, default="uint16")
    how = f"nanogpt {head.dtype} {head.offset}"
    return separated_shard(storage, name, head.tokens(blob), cut, how=how)


def _nanogpt_header(blob: Blob) -> _Head | None:
    """Return what the header of llm.c says; None where there is no header."""
    if blob.size < _HEADER_BYTES:
        return None
    mark, version, count = np.frombuffer(blob.read(0, 12), "<i4").tolist()
    if mark not in {known for known, _ in _MARKS}:
        return None
    if (mark, version) not in _MARKS:
        raise CorpusError(
            f"{blob.name} has a header of version {version}, which is not known",
            fix="Give files of fms-fsdp or nanoGPT, or name the format behind the path.",
        )
    dtype = _MARKS[mark, version]
    held = whole_items(blob.size - _HEADER_BYTES, dtype, name=blob.name)
    if held != count:
        raise CorpusError(
            f"{blob.name} holds {held:,} tokens, its header says {count:,}",
            fix="It is truncated or altered: restore it or make it again.",
        )
    return _Head(dtype, _HEADER_BYTES, count)


def _in_folders_with_index(shards: list[str], sizes: Mapping[str, int]) -> list[str]:
    folders = _folders_with_index(sizes)
    return [name for name in shards if name.rpartition("/")[0] in folders]


def _training_split(shards: list[str], sizes: Mapping[str, int]) -> list[str]:
    """Return the files of folders without Megatron indices, of the split for training."""
    folders = _folders_with_index(sizes)
    splits: dict[str, list[str]] = {}
    for name in shards:
        if name.rpartition("/")[0] not in folders:
            word = _SPLIT.search(name)
            splits.setdefault(word[1] if word else "", []).append(name)
    return one_split(splits)


def _folders_with_index(sizes: Mapping[str, int]) -> set[str]:
    return {name.rpartition("/")[0] for name in sizes if name.endswith(".idx")}


def _layout(
    open_shard: Callable[[Storage, str, Options], StoredShard],
    suffix: str,
    *beside: str,
    choose: Callable[[list[str], Mapping[str, int]], list[str]] = lambda shards, _sizes: shards,
    **options: str,
) -> Format:
    """Return the format of files that are told by the ends of their names.

    Args:
        suffix: of the file of tokens.
        beside: what stands in its place in the names of further files; the first of them tells of a shard
            even where its own file is missing.
        choose: (files that may be shards, all files by size) -> the shards.
        options: option -> what it says.
    """

    def companions(name: str) -> tuple[str, ...]:
        return tuple(name.removesuffix(suffix) + other for other in beside)

    def find(sizes: Mapping[str, int]) -> list[str]:
        found = {
            name.removesuffix(end) + suffix
            for end in (suffix, *beside[:1])
            for name in sizes
            if name.endswith(end)
        }
        return choose(sorted(found, key=str.encode), sizes)

    return Format(open_shard=open_shard, find=find, companions=companions, options=options)


MEGATRON = _layout(_megatron, ".bin", ".idx", choose=_in_folders_with_index)
DATATROVE = _layout(_datatrove, ".ds", ".ds.index", ".ds.metadata")
OLMO = _layout(
    _olmo,
    ".npy",
    ".csv.gz",
    eos_id=SEPARATORS["eos_id"],
    dtype="type of a stored token: uint16 or uint32, which the files do not say",
)
NANOGPT = _layout(
    _nanogpt,
    ".bin",
    choose=_training_split,
    **SEPARATORS,
    dtype="type of a stored token where the file has no header; uint16 if not given",
)

"""MosaicML's MDS shards, which its streaming library writes: one sample a document.

A shard is read in place. One that is compressed is unpacked once, whole, into the index folder (see
index_cache.py), where it stays: as much disk as the library itself takes. A folder of several splits is
read as its `train` split; for another, name that split's folder.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, BinaryIO

import numpy as np

from penstock.core.errors import CorpusError
from penstock.core.log import EventLog
from penstock.core.packages import Package
from penstock.data.formats import Format, Options, StoredShard
from penstock.data.formats.choice import COLUMN, by_folder, in_order, one_split
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.index_cache import keep, kept
from penstock.data.formats.mds_layout import CODECS, values_of
from penstock.data.formats.runs import run_shard, runs_of, starts_of
from penstock.storage.base import Absent, Blob, LocalBlob, Storage, probe

pa = Package("pyarrow", "Compressed files")

log = EventLog(__name__)

_INDEX = "index.json"
_FIRST = "shard.00000.mds"  # the name that the library gives the first
_CHUNK = 2**20

_Entry = tuple[dict[str, Any], dict[str, Any]]  # Any: JSON, checked where it is used
"""Index entries of a shard file: as stored, and as decompressed."""


def open_shard(storage: Storage, name: str, options: Options) -> StoredShard:
    """Open a shard; reads its header and the sizes of its samples. A compressed one is unpacked first.

    Raises:
        CorpusError: it is missing, truncated or altered, or has no column of tokens.
        UsageError: which column holds the tokens is not clear.
    """
    blob = storage.open(name)
    codec = name.rpartition(".")[2]
    unpacked = None if codec == "mds" else _unpacked(storage, name, blob, codec)
    blob = unpacked or blob
    data = np.asarray(blob.array(np.uint8, offset=0, count=blob.size)[0 : blob.size])
    found = values_of(data, options, name=blob.name)
    starts = starts_of(found.counts)
    tokens = runs_of(blob, found.dtype, places=found.places, starts=starts)
    ends = DocumentEnds(starts[1:], num_tokens=int(starts[-1]), name=blob.name)
    shard = run_shard(tokens, found.dtype, len(found.counts), ends.between, name=blob.name)
    return replace(shard, recheck=partial(_faults, storage, name, unpacked))


def find(sizes: Mapping[str, int]) -> list[str]:
    """Return the shards; of one that is there twice, the unpacked file.

    A split of which only the index is there is a split, and its shard is missing.

    Raises:
        UsageError: there are several splits, and none is `train`.
    """
    found: list[str] = []
    for name in sizes:
        stem, _, end = name.rpartition(".mds")
        plain = f"{stem}.mds"
        if stem and (not end or (end[1:] in (*CODECS, "snappy") and plain not in sizes)):
            found.append(name)
    held = {above for name in found for above in indices(name)}
    bare = [name for name in sizes if name.rpartition("/")[2] == _INDEX and name not in held]
    lost = [f"{name.removesuffix(_INDEX)}{_FIRST}" for name in bare]
    if not any(index in sizes for index in held):  # no shard has an index, or no index a shard
        return in_order(found or lost)
    folders = by_folder([*found, *lost])
    if _INDEX in sizes and "" not in folders:  # one index over several folders
        return [name for names in folders.values() for name in names]
    return one_split(folders)


def indices(name: str) -> tuple[str, ...]:
    """Return where a shard's index may be: in its folder, or above.

    >>> indices("train/shard.00000.mds")
    ('train/index.json', 'index.json')
    """
    parts = name.split("/")[:-1]
    return tuple("/".join([*parts[:depth], _INDEX]) for depth in range(len(parts), -1, -1))


def missing(storage: Storage, sizes: Mapping[str, int], shards: Sequence[str]) -> Iterator[str]:
    """Yield the indices that are not there, and the listed shards that are there in neither form."""
    for folder in dict.fromkeys(name.rpartition("/")[0] for name in shards):
        above = indices(f"{folder}/".lstrip("/"))
        index = next((path for path in above if path in sizes), None)
        if index is None:
            yield above[0]
            continue
        root = index.removesuffix(_INDEX)
        for forms in _listed(storage.open(index)):
            if not any(f"{root}{form}" in sizes for form in forms):
                yield f"{root}{forms[-1]}"


def _entry(storage: Storage, name: str) -> _Entry:
    """Return what the index says of a file; nothing where there is no index."""
    for path in indices(name):
        try:
            blob = storage.open(path)
        except Absent:
            continue
        if found := _entries_in(blob).get(name[len(path) - len(_INDEX) :]):
            return found
    return {}, {}


def _listed(index: Blob) -> Iterator[tuple[str, ...]]:
    """Yield the names of each shard that an index lists: unpacked, and packed where it is."""
    names: dict[int, list[str]] = {}
    for name, (_, raw) in _entries_in(index).items():
        names.setdefault(id(raw), []).append(name)
    yield from map(tuple, names.values())


def _entries_in(index: Blob) -> dict[str, _Entry]:
    try:
        return _entries(index.read(0, index.size))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorpusError(
            f"{index.name} is no index of MDS shards", fix="It is truncated or altered: restore it."
        ) from None


@lru_cache(maxsize=8)  # each of ten thousand shards asks for its own entry
def _entries(text: bytes) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for shard in json.loads(text)["shards"]:
        raw = dict(shard["raw_data"])
        for file in (raw, shard["zip_data"]):
            if file:
                found[str(file["basename"])] = (dict(file), raw)
    return found


def _unpacked(storage: Storage, name: str, blob: Blob, codec: str) -> Blob:
    """Return a compressed shard as an unpacked file: the one that was kept, or a new one."""
    if codec not in CODECS:
        raise CorpusError(
            f"{blob.name} is compressed as {codec}, which is not read", fix=f"Known: {', '.join(CODECS)}."
        )
    told, raw = _entry(storage, name)
    size = _raw_bytes(raw, blob.name)
    file = f"{name.replace('/', '+')[-80:]}-{probe(storage, name)}.mds"
    path = kept(storage, file)
    if path is None or path.stat().st_size != size:
        for problem in _differences(told, blob):
            raise CorpusError(f"{blob.name} {problem}", fix="It is truncated or altered: restore it.")
        try:
            path = keep(storage, file, lambda out: _unpack(blob, codec, size, out))
        except OSError as error:
            raise CorpusError(
                f"{blob.name} cannot be unpacked: {error}",
                fix="Make room, or set PENSTOCK_CACHE to a folder on a larger disk.",
            ) from None
    return LocalBlob(path)


def _raw_bytes(raw: dict[str, Any], name: str) -> int:  # Any: JSON
    size = raw.get("bytes")
    if type(size) is not int or size < 0:
        raise CorpusError(
            f"{name} is compressed, and no index.json says its unpacked size",
            fix="Restore the index.json that was written with it.",
        )
    return size


def _unpack(blob: Blob, codec: str, size: int, out: BinaryIO) -> None:
    """Unpack a file in pieces; never more than the size that its index says."""
    done = 0
    try:
        with (
            pa.OSFile(str(blob.path())) as source,
            pa.CompressedInputStream(source, CODECS[codec]) as unpacked,
        ):
            while piece := unpacked.read(min(_CHUNK, size - done + 1)):
                done += len(piece)
                if done > size:
                    break
                out.write(piece)
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # the disk's, not the decoder's
            raise
        raise CorpusError(
            f"{blob.name} cannot be unpacked: {error}", fix="It is truncated or altered: restore it."
        ) from None
    if done != size:
        raise CorpusError(
            f"{blob.name} does not unpack to the {size:,} bytes that its index says",
            fix="One of them is truncated or altered: restore them.",
        )


def _faults(storage: Storage, name: str, unpacked: Blob | None) -> Iterator[str]:
    """Say where a file, or what it was unpacked to, is not what its index says."""
    told, raw = _entry(storage, name)
    yield from _differences(told, storage.open(name))
    if unpacked is not None:
        for problem in _differences(raw, unpacked):
            yield f"was unpacked to {unpacked.name}, which {problem}"


def _differences(told: dict[str, Any], blob: Blob) -> Iterator[str]:  # Any: JSON
    """Say where a file is not what an index says of it."""
    if (size := told.get("bytes", blob.size)) != blob.size:
        yield f"has {blob.size:,} bytes, its index says {size}"
        return
    hashes = told.get("hashes")
    for kind, wanted in sorted(hashes.items()) if isinstance(hashes, dict) else ():
        digest = _digest(kind)
        if digest is None:
            _say_not_checked(kind)
            continue
        for start in range(0, blob.size, _CHUNK):
            digest.update(blob.read(start, min(start + _CHUNK, blob.size)))
        if digest.hexdigest() != wanted:
            yield f"is altered: its {kind} is not the one of its index"


@cache  # once a process, however many shards there are
def _say_not_checked(kind: str) -> None:
    log.warning(
        "checksum_unchecked",
        "{checksum} checksums of MDS indices are not verified: no installed package computes them",
        checksum=kind,
    )


def _digest(kind: str) -> Any:  # Any: xxhash is not always installed
    if kind in hashlib.algorithms_available and not kind.startswith("shake"):
        return hashlib.new(kind, usedforsecurity=False)
    try:
        import xxhash  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return getattr(xxhash, kind, lambda: None)()


MDS = Format(
    open_shard=open_shard,
    find=find,
    indices=indices,
    missing=missing,
    options={**COLUMN, "dtype": "type of a token where the column holds bytes; int64 if not given"},
)

"""Verify a corpus against its manifest: every byte, offset, count and token id.

Files of other tools have no checksum: their documents are searched again, and their counts, offsets and token
ids are checked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.arrays import Int64, Tokens
from penstock.core.errors import CorpusError, InputError
from penstock.core.files import TOKENIZER_FILE, checksum
from penstock.data.corpus.columns import column_faults
from penstock.data.corpus.manifest import Manifest, ShardEntry
from penstock.data.corpus.open import described
from penstock.data.corpus.spec import parse_spec
from penstock.data.formats import FORMATS, TokenShard, probe_of
from penstock.storage.base import LocalStorage, Storage
from penstock.text.tokenizer import Tokenizer

_CHUNK = 2**22  # tokens checked at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFault:
    """Difference between a corpus and its manifest."""

    file: str
    """Name inside the corpus folder."""
    problem: str
    """Description of the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of verifying a corpus."""

    manifest: Manifest
    """Manifest that the corpus was checked against."""
    faults: tuple[CorpusFault, ...]
    """All faults in shard order; empty for a sound corpus."""


def verify(
    path: str | Path, *, on_progress: Callable[[int, int], None] = lambda _done, _all: None
) -> Verdict:
    """Read a whole corpus and return every fault found.

    Args:
        path: a folder, an address or a spec, as for `open_corpus`.
        on_progress: called after each shard with (bytes checked, bytes of all shards).

    Raises:
        CorpusError: there is no corpus, or its manifest is damaged.
        UsageError: the spec is invalid, or its corpus has no files.
    """
    storage, manifest = described(parse_spec(str(path)))
    owners = {shard.checksum: shard.name for shard in manifest.shards if shard.checksum}
    faults = [
        CorpusFault(file=TOKENIZER_FILE, problem=problem) for problem in _tokenizer_faults(storage, manifest)
    ]
    done, total = 0, sum(shard.bytes for shard in manifest.shards)
    on_progress(done, total)
    for entry in manifest.shards:
        problems = _shard_faults(storage, entry, manifest, owners)
        faults += [CorpusFault(file=entry.name, problem=problem) for problem in problems]
        for column, file in zip(manifest.columns, entry.columns, strict=True):
            found = column_faults(storage, column, file, tokens=entry.tokens)
            faults += [CorpusFault(file=file.name, problem=problem) for problem in found]
        done += entry.bytes
        on_progress(done, total)
    return Verdict(manifest=manifest, faults=tuple(faults))


def _tokenizer_faults(storage: Storage, manifest: Manifest) -> Iterator[str]:
    if manifest.eos_id is not None and manifest.eos_id >= manifest.vocab_size:
        yield f"the end token {manifest.eos_id} is outside the vocabulary of {manifest.vocab_size}"
    if manifest.tokenizer is None:
        return
    try:
        path = storage.open(TOKENIZER_FILE).path()
    except CorpusError as error:
        yield _absence(storage, error)
        return
    if checksum(path) != manifest.tokenizer:
        yield "altered: its checksum is not the manifest's"
        return
    try:
        size = Tokenizer.load(path).vocab_size
    except InputError as error:
        yield str(error)
    else:
        if size != manifest.vocab_size:
            yield f"holds a vocabulary of {size}, the manifest says {manifest.vocab_size}"


def _absence(storage: Storage, error: CorpusError) -> str:
    return "missing" if isinstance(storage, LocalStorage) else f"cannot be read: {error}"


def _shard_faults(
    storage: Storage, entry: ShardEntry, manifest: Manifest, owners: dict[str, str]
) -> Iterator[str]:
    try:
        blob = storage.open(entry.name)
    except CorpusError as error:
        yield _absence(storage, error)
        return
    if blob.size != entry.bytes:
        yield f"has {blob.size:,} bytes, the manifest says {entry.bytes:,}"
    if entry.checksum and (found := checksum(blob.path())) != entry.checksum:
        owner = owners.get(found)
        yield f"holds the content of {owner}" if owner else "altered: its checksum is not the manifest's"
    elif entry.probe and probe_of(manifest.format, storage, entry.name) != entry.probe:
        yield "altered: it, or a file that belongs to it, has changed"
    try:
        shard = FORMATS[manifest.format].open_shard(storage, entry.name, manifest.options)
    except CorpusError as error:
        yield f"cannot be opened: {error}"
        return
    yield from _count_faults(shard, entry, manifest)
    yield from shard.recheck()
    try:
        yield from _offset_faults(shard, manifest.eos_id if entry.checksum else None)
    except CorpusError as error:
        yield f"its document offsets are damaged: {error}"
    try:
        yield from _token_faults(shard, manifest)
    except CorpusError as error:
        yield str(error)


def _count_faults(shard: TokenShard, entry: ShardEntry, manifest: Manifest) -> Iterator[str]:
    for what, number, wanted in (
        ("tokens", shard.num_tokens, entry.tokens),
        ("documents", shard.num_documents, entry.documents),
    ):
        if number != wanted:
            yield f"holds {number:,} {what}, the manifest says {wanted:,}"
    dtype = shard.tokens[0:0].dtype
    if dtype != manifest.dtype if entry.checksum else not np.can_cast(dtype, manifest.dtype):
        yield f"its tokens are {dtype}, the manifest says {manifest.dtype}"


def _offset_faults(shard: TokenShard, eos_id: int | None) -> Iterator[str]:
    before = unended = 0
    for start, stop, tokens in _chunks(shard):
        ends = shard.document_ends(start, stop)
        if not len(ends):
            continue
        if ends[0] <= start or ends[-1] > stop or (np.diff(ends) < 0).any():
            yield "its document offsets are not ascending"
            return
        before = int(ends[-1])
        if eos_id is not None:
            last: Int64 = ends - (start + 1)
            unended += int((tokens[last] != eos_id).sum())
    if before != shard.num_tokens:
        yield f"its last document ends at token {before:,} of {shard.num_tokens:,}"
    elif unended:
        yield f"{unended:,} documents do not end with the end token {eos_id}"


def _token_faults(shard: TokenShard, manifest: Manifest) -> Iterator[str]:
    limit = manifest.vocab_size
    for start, _, tokens in _chunks(shard):
        if int(tokens.max()) >= limit:
            place = int((tokens >= limit).argmax())
            yield f"token {start + place:,} is {int(tokens[place])}, outside the vocabulary of {limit}"
            return


def _chunks(shard: TokenShard) -> Iterator[tuple[int, int, Tokens]]:
    for start in range(0, shard.num_tokens, _CHUNK):
        stop = min(start + _CHUNK, shard.num_tokens)
        yield start, stop, shard.tokens[start:stop]

"""Check a corpus against its manifest: every byte, offset, count and token id."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.errors import CorpusError, InputError
from penstock.core.files import checksum
from penstock.data.formats import FORMATS, TokenShard
from penstock.data.manifest import TOKENIZER_FILE, Manifest, ShardEntry, load_manifest
from penstock.data.storage import LocalStorage
from penstock.data.types import Int64
from penstock.text.tokenizer import Tokenizer

_CHUNK = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is not as the manifest says."""

    file: str
    """Name inside the corpus folder."""
    problem: str
    """What is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a check."""

    manifest: Manifest
    """What was checked against."""
    faults: tuple[Fault, ...]
    """All of them, in shard order; none for a sound corpus."""


def verify(folder: Path, *, on_progress: Callable[[int, int], None] = lambda _done, _all: None) -> Verdict:
    """Read a whole corpus and return every fault found.

    Args:
        on_progress: called after each shard with the bytes checked and the bytes of all shards.

    Raises:
        CorpusError: no corpus there, or its manifest is damaged.
    """
    manifest = load_manifest(folder)
    owners = {shard.checksum: shard.name for shard in manifest.shards}
    faults = [Fault(file=TOKENIZER_FILE, problem=problem) for problem in _tokenizer_faults(folder, manifest)]
    done, total = 0, sum(shard.bytes for shard in manifest.shards)
    on_progress(done, total)
    for entry in manifest.shards:
        problems = _shard_faults(folder / entry.name, entry, manifest, owners)
        faults += [Fault(file=entry.name, problem=problem) for problem in problems]
        done += entry.bytes
        on_progress(done, total)
    return Verdict(manifest=manifest, faults=tuple(faults))


def _tokenizer_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    if manifest.eos_id is not None and manifest.eos_id >= manifest.vocab_size:
        yield f"the end token {manifest.eos_id} is outside the vocabulary of {manifest.vocab_size}"
    if manifest.tokenizer is None:
        return
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        yield "missing"
    elif checksum(path) != manifest.tokenizer:
        yield "altered: its checksum is not the manifest's"
    else:
        try:
            size = Tokenizer.load(path).vocab_size
        except InputError as error:
            yield str(error)
        else:
            if size != manifest.vocab_size:
                yield f"holds a vocabulary of {size}, the manifest says {manifest.vocab_size}"


def _shard_faults(path: Path, entry: ShardEntry, manifest: Manifest, owners: dict[str, str]) -> Iterator[str]:
    if not path.is_file():
        yield "missing"
        return
    if (size := path.stat().st_size) != entry.bytes:
        yield f"has {size:,} bytes, the manifest says {entry.bytes:,}"
    found = checksum(path)
    if found != entry.checksum:
        owner = owners.get(found)
        yield f"holds the content of {owner}" if owner else "altered: its checksum is not the manifest's"
    try:
        shard: TokenShard = FORMATS[manifest.format](LocalStorage(path.parent), path.name, {})
    except CorpusError as error:
        yield f"cannot be opened: {error}"
        return
    for what, number, wanted in (
        ("tokens", shard.num_tokens, entry.tokens),
        ("documents", shard.num_documents, entry.documents),
    ):
        if number != wanted:
            yield f"holds {number:,} {what}, the manifest says {wanted:,}"
    yield from _offset_faults(shard, manifest.eos_id)
    yield from _token_faults(shard, manifest)


def _offset_faults(shard: TokenShard, eos_id: int | None) -> Iterator[str]:
    ends = shard.document_ends(0, shard.num_tokens)
    before = 0
    for start in range(0, len(ends), _CHUNK):
        chunk = ends[start : start + _CHUNK]
        if (np.diff(chunk, prepend=before) < 0).any():
            yield "its document offsets do not rise"
            return
        before = int(chunk[-1])
    if before != shard.num_tokens:
        yield f"its last document ends at token {before:,} of {shard.num_tokens:,}"
    elif eos_id is not None and (missing := _unended(shard, ends, eos_id)):
        yield f"{missing:,} documents do not end with the end token {eos_id}"


def _unended(shard: TokenShard, ends: Int64, eos_id: int) -> int:
    tokens = shard.tokens[0 : shard.num_tokens]
    chunks = (ends[start : start + _CHUNK] for start in range(0, len(ends), _CHUNK))
    return sum(int((tokens[chunk - 1] != eos_id).sum()) for chunk in chunks)


def _token_faults(shard: TokenShard, manifest: Manifest) -> Iterator[str]:
    for start in range(0, shard.num_tokens, _CHUNK):
        tokens = shard.tokens[start : min(start + _CHUNK, shard.num_tokens)]
        if str(tokens.dtype) != manifest.dtype:
            yield f"its tokens are {tokens.dtype}, the manifest says {manifest.dtype}"
            return
        if int(tokens.max()) >= manifest.vocab_size:
            place = int((tokens >= manifest.vocab_size).argmax())
            limit, found = manifest.vocab_size, int(tokens[place])
            yield f"token {start + place:,} is {found}, outside the vocabulary of {limit}"
            return

"""Foreign corpora: the manifest of files made by other tools, built once from the files and cached.

Files that store their counts are not read whole. The manifest is kept in the index folder (see
index_cache.py) with the sizes of all its files, and rebuilt when a file was added or changed.

It is an error if a file was removed or truncated since, or if a file listed by an index is missing: a corpus
with a hole would be served as a different corpus. A missing file cannot be detected in a folder that no index
lists and that was never opened before.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from penstock.core import config
from penstock.core.errors import CorpusError, PenstockError, UsageError
from penstock.data.corpus.manifest import Manifest, ShardEntry
from penstock.data.corpus.spec import GRAMMAR
from penstock.data.formats import FORMATS, Options, probe_of
from penstock.data.formats.index_cache import keep, kept, kept_like
from penstock.storage.base import LocalStorage, Storage

_FOREIGN = [name for name in FORMATS if name != "arrow"]  # Arrow corpora have a manifest
_OWN = re.compile(r"shard-\d{5}\.arrow")
_VERSION = 2  # raise it when a reader counts differently: cached manifests of other versions are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Cached manifest of a folder, and the file sizes it is valid for."""

    manifest: Manifest
    files: dict[str, int]
    """Size in bytes of each file the manifest was made from."""


OnFile = Callable[[int, int], None]
"""Progress callback: (bytes of the shards read so far, bytes of all shards)."""


def foreign_manifest(
    storage: Storage,
    sizes: Mapping[str, int],
    *,
    prefix: str,
    format: str | None,  # noqa: A002 - the word of the manifest
    options: Options,
    on_progress: OnFile = lambda _done, _all: None,
) -> Manifest:
    """Return the manifest of files made by another tool: the cached one, or a new one.

    Args:
        sizes: files to use, with their sizes in bytes; other files of the folder are ignored.
        prefix: common prefix of the shard names; empty: the whole folder.
        format: row of FORMATS; None: detected from the file names.

    Raises:
        CorpusError: the files have no known format, or several, are damaged, or contain no tokens.
        UsageError: an option is missing or out of range.
    """
    for known in [format] if format else _FOREIGN:
        _check_nothing_lost(storage, sizes, known, prefix)
    name = format or detect(storage.location, sizes, prefix=prefix)
    shards = _chosen(FORMATS[name].find(sizes), prefix)
    if not shards:
        raise CorpusError(
            f"{storage.location} has no files of format {name} ({_seen(sizes)})",
            fix="Correct the path, or the format behind its colon.",
        )
    files = _files_of(name, sizes, shards)
    file = f"{name}-{config.fingerprint([_VERSION, dict(options), prefix])}.json"
    found = _read(kept(storage, file))
    if found is None or found.files != files or not _is_current(found.manifest, storage):
        _check_complete(storage, sizes, shards, name, is_part=bool(prefix))
        manifest = _made(storage, sizes, shards, format=name, options=options, on_progress=on_progress)
        found = _Kept(manifest=manifest, files=files)
        content = json.dumps(config.dump(found)).encode()
        keep(storage, file, lambda out: out.write(content))
    return found.manifest


def detect(location: str, sizes: Mapping[str, int], *, prefix: str = "") -> str:
    """Return the format of files, detected from their names.

    Args:
        prefix: common prefix of the files that were asked for.

    Raises:
        CorpusError: the names match no format, or several.
    """
    if any(_OWN.fullmatch(name) for name in sizes):
        raise CorpusError(
            f"{location}/manifest.json is missing, although the folder contains shards made by Penstock",
            fix="Restore it or prepare the corpus again; if another tool made the shards, name the format.",
        )
    found = [name for name in _FOREIGN if any(shard in sizes for shard in FORMATS[name].find(sizes))]
    if len(found) == 1:
        return found[0]
    if found:
        raise CorpusError(
            f"Corpus {location} matches several formats: {', '.join(found)}",
            fix=f"Name one, as in '{found[0]}:{location}'.",
        )
    if prefix in sizes:
        raise CorpusError(
            f"{prefix if location == '.' else f'{location}/{prefix}'} is a file, not a corpus, and its name "
            "matches no known format",
            fix=f"Make a corpus of it with `penstock data prepare INPUT --out DIR` and name DIR, or write "
            f"{GRAMMAR}; formats: {', '.join(FORMATS)}.",
        )
    raise CorpusError(
        f"Corpus {location} has no manifest.json, and its file names match no known format ({_seen(sizes)})",
        fix=f"Make it with `penstock data prepare INPUT --out DIR`, or write {GRAMMAR}; "
        f"formats: {', '.join(FORMATS)}.",
    )


def _chosen(shards: Sequence[str], prefix: str) -> list[str]:
    return [name for name in shards if not prefix or name == prefix or name.startswith(f"{prefix}.")]


def _files_of(format: str, sizes: Mapping[str, int], shards: Sequence[str]) -> dict[str, int]:  # noqa: A002
    """Return the sizes of the existing files that shards are read from or listed in."""
    of = FORMATS[format]
    names = [name for shard in shards for name in (shard, *of.companions(shard), *of.indices(shard))]
    return {name: sizes[name] for name in names if name in sizes}


def _read(path: Path | None) -> _Kept | None:
    """Return the cached manifest; None if it is damaged or of another version."""
    try:
        return config.build(_Kept, config.load_json(path)) if path else None
    except (PenstockError, OSError):
        return None


def _is_current(found: Manifest, storage: Storage) -> bool:
    """Return True if the local files still match a manifest; remote files are checked when opened."""
    near = isinstance(storage, LocalStorage)
    return not near or all(
        entry.probe == probe_of(found.format, storage, entry.name) for entry in found.shards
    )


def _check_nothing_lost(storage: Storage, sizes: Mapping[str, int], format: str, prefix: str) -> None:  # noqa: A002
    """Refuse a folder in which a file of the cached manifest is missing or smaller than before.

    Raises:
        CorpusError: with the file's name.
    """
    for path in kept_like(storage, f"{format}-*.json"):
        found = _read(path)
        for name, size in found.files.items() if found else ():
            if prefix and not _chosen([name], prefix.rsplit(".", 1)[0]):
                continue
            if sizes.get(name, 0) < size:
                what = f"has {sizes[name]:,} bytes" if name in sizes else "is missing"
                raise CorpusError(
                    f"{storage.location}/{name} {what}; it had {size:,} bytes when it was first opened",
                    fix=f"Restore it; if the corpus was changed on purpose, delete {path}.",
                )


def _check_complete(
    storage: Storage,
    sizes: Mapping[str, int],
    shards: Sequence[str],
    format: str,  # noqa: A002
    *,
    is_part: bool,
) -> None:
    """Refuse a folder that lacks a file listed by an index or implied by the other files.

    Args:
        is_part: True if the user named only some of the folder's files.

    Raises:
        CorpusError: with the file's name.
    """
    absent = [name for name in shards if name not in sizes]
    if not is_part and not absent:
        absent += FORMATS[format].missing(storage, sizes, shards)
    for others in zip(*(FORMATS[format].companions(name) for name in shards), strict=True):
        if any(name in sizes for name in others):
            absent += [name for name in others if name not in sizes]
    if absent:
        more = f", and {len(absent) - 1:,} more" if len(absent) > 1 else ""
        raise CorpusError(
            f"{storage.location}/{absent[0]} is missing{more}: other files of the corpus refer to it",
            fix="Restore it; or move files that are a corpus of their own to another folder.",
        )


def _made(
    storage: Storage,
    sizes: Mapping[str, int],
    shards: Sequence[str],
    *,
    format: str,  # noqa: A002
    options: Options,
    on_progress: OnFile,
) -> Manifest:
    entries: list[ShardEntry] = []
    dtypes: set[str] = set()
    largest: list[int] = []
    done, total = 0, sum(sizes[name] for name in shards)
    for name in shards:
        on_progress(done, total)
        shard = FORMATS[format].open_shard(storage, name, options)
        dtypes.add(str(shard.tokens[0:0].dtype))
        largest.append(shard.largest_id)  # known for formats that must read all tokens
        entries.append(
            ShardEntry(
                name=name,
                tokens=shard.num_tokens,
                documents=shard.num_documents,
                bytes=sizes[name],
                probe=probe_of(format, storage, name),
            )
        )
        done += sizes[name]
    on_progress(total, total)
    if not any(entry.tokens for entry in entries):
        raise CorpusError(
            f"Corpus {storage.location} has no tokens in its {len(entries)} {format} files",
            fix="Leave it out, or write it again.",
        )
    dtype: Literal["uint16", "uint32"] = "uint32" if "uint32" in dtypes else "uint16"
    eos_id = options.get("eos_id", "none")
    known = max(largest) + 1 if min(largest) >= 0 else np.iinfo(dtype).max + 1
    return Manifest(
        format=format,
        dtype=dtype,
        vocab_size=_whole(options, "vocab_size", 2**32) if "vocab_size" in options else known,
        eos_id=None if eos_id == "none" else _whole(options, "eos_id", 2**32 - 1),
        options=dict(options),
        shards=tuple(entries),
    )


def _whole(options: Options, name: str, most: int) -> int:
    text = options[name]
    if not (text.isascii() and text.isdecimal() and int(text) <= most):
        raise UsageError(f"{name} must be a whole number up to {most:,}", got=text)
    return int(text)


def _seen(sizes: Mapping[str, int]) -> str:
    """Return the number of files by suffix, for messages."""
    endings = Counter("".join(PurePosixPath(name).suffixes[-2:]) or "no ending" for name in sizes)
    listed = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(5))
    return f"seen: {listed}{', ...' if len(endings) > 5 else ''}" if endings else "it is empty"

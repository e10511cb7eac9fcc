"""Corpora that other tools made: their manifest, made once from the files and kept.

Nothing is read whole where the files store their counts. The manifest lies in the index folder (see
index_folder.py) and is made again when a file came, went, changed its size, or its first or last bytes.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from penstock.core import config
from penstock.core.errors import CorpusError, PenstockError, UsageError
from penstock.data.formats import COMPANIONS, FINDERS, FORMATS, Options, TokenShard
from penstock.data.index_folder import keep, kept
from penstock.data.manifest import Manifest, ShardEntry
from penstock.data.probe import probe
from penstock.data.spec import GRAMMAR
from penstock.data.storage import LocalStorage, Storage

_VERSION = 1  # raised when a reader counts otherwise: what was kept before is then not looked at

OnProgress = Callable[[int, int], None]
"""Called with the bytes of the shards that were read and of all."""


def foreign_manifest(
    storage: Storage,
    sizes: Mapping[str, int],
    *,
    prefix: str,
    format: str | None,  # noqa: A002 - the word of the manifest
    options: Options,
    on_progress: OnProgress = lambda _done, _all: None,
) -> Manifest:
    """Return the manifest of files that another tool made: the one that was kept, or a new one.

    Args:
        sizes: the files to look at; of other files nothing is known.
        prefix: what the names of the shards begin with; empty for all of a folder.
        format: row of FORMATS, or None where the names of the files tell.

    Raises:
        CorpusError: the files are of no known format, of several, damaged, or without tokens.
        UsageError: an option is missing or out of range.
    """
    name = format or detect(storage.location, sizes)
    shards = _chosen(FINDERS[name](sizes), prefix)
    if not shards:
        raise CorpusError(f"{storage.location} has no files of format {name} ({_seen(sizes)})")
    file = f"{name}-{config.fingerprint([_VERSION, dict(options), prefix])}.json"
    found = _read(kept(storage, file))
    if found is None or not _is_current(found, storage, sizes, shards):
        found = _made(storage, sizes, shards, format=name, options=options, on_progress=on_progress)
        content = json.dumps(config.dump(found)).encode()
        keep(storage, file, lambda out: out.write(content))
    return found


def detect(location: str, sizes: Mapping[str, int]) -> str:
    """Return the format that files' names tell.

    Raises:
        CorpusError: they tell none, or several.
    """
    found = {name: len(shards) for name in FINDERS if (shards := FINDERS[name](sizes))}
    if len(found) == 1:
        return next(iter(found))
    if found:
        raise CorpusError(
            f"Corpus {location} may be of several formats: {', '.join(found)}",
            fix=f"Say which, as in '{next(iter(found))}:{location}'.",
        )
    raise CorpusError(
        f"Corpus {location} has no manifest.json, and its files are of no format that their names tell "
        f"({_seen(sizes)})",
        fix=f"Make it with `penstock data prepare INPUT --out DIR`, or write {GRAMMAR}; "
        f"formats: {', '.join(FORMATS)}.",
    )


def probe_of(format: str, storage: Storage, name: str) -> str:  # noqa: A002
    """Return the probe of a shard and the files that belong to it; see probe.py."""
    return probe(storage, name, COMPANIONS[format](name) if format in COMPANIONS else ())


def _chosen(shards: Sequence[str], prefix: str) -> list[str]:
    return [name for name in shards if not prefix or name == prefix or name.startswith(f"{prefix}.")]


def _read(path: Path | None) -> Manifest | None:
    """Return a manifest that was kept; None where it is of another version, or damaged."""
    try:
        return config.build(Manifest, config.load_json(path)) if path else None
    except (PenstockError, OSError):
        return None


def _is_current(found: Manifest, storage: Storage, sizes: Mapping[str, int], shards: Sequence[str]) -> bool:
    """Whether files are as a manifest says; those far away are probed when they are opened."""
    if [(entry.name, entry.bytes) for entry in found.shards] != [(name, sizes[name]) for name in shards]:
        return False
    near = isinstance(storage, LocalStorage)
    return not near or all(
        entry.probe == probe_of(found.format, storage, entry.name) for entry in found.shards
    )


def _made(
    storage: Storage,
    sizes: Mapping[str, int],
    shards: Sequence[str],
    *,
    format: str,  # noqa: A002
    options: Options,
    on_progress: OnProgress,
) -> Manifest:
    entries: list[ShardEntry] = []
    dtypes: set[str] = set()
    largest: list[int] = []
    done, total = 0, sum(sizes[name] for name in shards)
    for name in shards:
        on_progress(done, total)
        shard: TokenShard = FORMATS[format](storage, name, options)
        dtypes.add(str(shard.tokens[0:0].dtype))
        largest.append(getattr(shard, "largest_id", -1))  # known where all tokens had to be read
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
        raise CorpusError(f"Corpus {storage.location} has no tokens in its {len(entries)} {format} files")
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
    """Say what files there are, by their endings."""
    endings = Counter("".join(PurePosixPath(name).suffixes[-2:]) or "no ending" for name in sizes)
    listed = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(5))
    return f"seen: {listed}{', ...' if len(endings) > 5 else ''}" if endings else "it is empty"

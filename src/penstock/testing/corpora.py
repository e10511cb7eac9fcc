"""Tiny corpora on disk, made from documents given as token lists."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.core.files import checksum
from penstock.data.corpus.columns import write_column
from penstock.data.corpus.manifest import ColumnEntry, Manifest, ShardEntry, save_manifest
from penstock.data.formats.arrow import write_shard
from penstock.storage.base import LocalStorage, probe


def write_corpus(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    vocab_size: int = 65_536,
    documents_per_shard: int = 100,
    columns: Mapping[str, Sequence[Sequence[bool]]] | None = None,
) -> Path:
    """Write documents, each a sequence of token ids and possibly empty, as a corpus; return its folder.

    Args:
        columns: name -> a bit for each token of each document.
    """
    bits = columns or {}
    kinds = tuple(ColumnEntry(name=name, dtype="bit") for name in bits)
    folder.mkdir(parents=True, exist_ok=True)
    dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 65_536 else "uint32"
    entries: list[ShardEntry] = []
    for first in range(0, len(documents), documents_per_shard):
        group = documents[first : first + documents_per_shard]
        offsets = np.cumsum([0, *map(len, group)], dtype=np.int64)
        tokens = np.array([token for document in group for token in document], dtype=dtype)
        path = folder / f"shard-{len(entries):05d}.arrow"
        write_shard(path, tokens, offsets)
        entries.append(
            ShardEntry(
                name=path.name,
                tokens=len(tokens),
                documents=len(group),
                bytes=path.stat().st_size,
                checksum=checksum(path),
                probe=probe(LocalStorage(folder), path.name),
                columns=tuple(
                    write_column(
                        folder, path.name, kind, _joined(bits[kind.name][first : first + len(group)])
                    )
                    for kind in kinds
                ),
            )
        )
    made = Manifest(format="arrow", dtype=dtype, vocab_size=vocab_size, shards=tuple(entries), columns=kinds)
    save_manifest(folder, made)
    return folder


def _joined(documents: Sequence[Sequence[bool]]) -> npt.NDArray[np.bool_]:
    return np.array([bit for document in documents for bit in document], dtype=np.bool_)


def numbered_corpus(folder: Path, lengths: Sequence[int], *, documents_per_shard: int = 100) -> Path:
    """Write documents of given lengths in which the token at position p of the corpus is p + 1.

    So every token identifies its position, and none is 0: the output of a loader shows where it came from.
    """
    starts = np.cumsum([1, *lengths]).tolist()
    documents = [range(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return write_corpus(folder, documents, vocab_size=2**32, documents_per_shard=documents_per_shard)

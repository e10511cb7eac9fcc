"""Folders of every format with several shards, and what happens to one file of them."""

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.errors import PenstockError
from penstock.data import open_corpus
from penstock.data.formats.flat_layouts import write_megatron
from penstock.testing.corpora import write_corpus
from tests.format_examples import EXAMPLES

SHARDS = [[[11, 12, 0], [13, 0]], [[21, 0], [22, 23, 24, 0]], [[31, 32, 33, 0]], [[41, 0], [42, 43, 0]]]
"""Documents of the shards of the folders that are made here."""


@dataclass(frozen=True)
class Folder:
    """One corpus in several files."""

    name: str
    write: Callable[[Path], None]
    format: str
    options: str = ""
    is_indexed: bool = True
    """Whether its files' names, or an index among them, tell that one is missing."""

    def spec(self, place: object) -> str:
        return f"{self.format}:{place}{self.options}" if self.format else str(place)


def documents_of(spec: str) -> list[list[int]]:
    """Read a whole corpus."""
    corpus = open_corpus(spec)
    found = corpus.fragments([(0, corpus.num_tokens)])
    pairs = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
    return [corpus.tokens(start, start + length).tolist() for start, length in pairs]


def served(spec: str) -> tuple[list[list[int]] | None, str]:
    """Return what is read, or what is said instead."""
    try:
        return documents_of(spec), ""
    except PenstockError as error:
        return None, str(error)


def files_of(folder: Path) -> list[str]:
    """Return the names of the files that a tool wrote."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [name for path in paths if not (name := path.relative_to(folder).as_posix()).startswith(".")]


def spoil(path: Path, how: str) -> None:
    """Do to one file what people, copies and full disks do."""
    if how == "deleted":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name(f"moved-{path.name}"))
    else:
        path.write_bytes(b"")


def _flat(shard: list[list[int]]) -> np.ndarray:
    return np.array([token for document in shard for token in document], np.uint16)


def _ends(shard: list[list[int]]) -> np.ndarray:
    return np.cumsum([len(document) for document in shard])


def _megatron(folder: Path) -> None:
    for number, shard in enumerate(SHARDS):
        offsets = np.concatenate(([0], _ends(shard)))
        write_megatron(folder / f"web_{number:02d}_text_document.bin", _flat(shard), offsets)


def _datatrove(folder: Path) -> None:
    for number, shard in enumerate(SHARDS):
        _flat(shard).tofile(folder / f"{number:05d}_unshuffled.ds")
        _ends(shard).astype(np.uint64).tofile(folder / f"{number:05d}_unshuffled.ds.index")
        (folder / f"{number:05d}_unshuffled.ds.metadata").write_text("gpt2|2\n14\n")


def _olmo(folder: Path) -> None:
    for number, shard in enumerate(SHARDS):
        (folder / "deep").mkdir(exist_ok=True)
        _flat(shard).tofile(folder / "deep" / f"part-{number}-00000.npy")
        ends = _ends(shard).tolist()
        rows = "".join(f"{start},{end},id\n" for start, end in zip([0, *ends[:-1]], ends, strict=True))
        (folder / "deep" / f"part-{number}-00000.csv.gz").write_bytes(gzip.compress(rows.encode()))


def _nanogpt(folder: Path) -> None:
    for number, shard in enumerate(SHARDS):
        _flat(shard).tofile(folder / f"web_train_{number:06d}.bin")


def _parquet(folder: Path, pattern: str) -> None:
    for number, shard in enumerate(SHARDS):
        pq.write_table(pa.table({"ids": pa.array(shard, pa.list_(pa.uint16()))}), folder / (pattern % number))


def _fms(folder: Path) -> None:
    schema = pa.schema([("tokens", pa.uint16())])
    for number, shard in enumerate(SHARDS):
        path = str(folder / f"web-{number}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for document in shard:
                writer.write_batch(pa.record_batch([pa.array(document, pa.uint16())], schema=schema))


def _hf(folder: Path, splits: tuple[str, ...] = ("",)) -> None:
    for split in splits:
        below = folder / split
        below.mkdir(exist_ok=True)
        names = [f"data-{number:05d}-of-{len(SHARDS):05d}.arrow" for number in range(len(SHARDS))]
        for name, shard in zip(names, SHARDS, strict=True):
            table = pa.table({"ids": pa.array(shard, pa.list_(pa.uint16()))})
            with pa.OSFile(str(below / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        (below / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (below / "dataset_info.json").write_text("{}")
    if splits != ("",):
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


def _mds(folder: Path) -> None:
    """Two folders of shards under one merged index, as `merge_index` writes it."""
    merged = []
    for number, source in enumerate(("ndarray-2d", "ndarray")):
        shutil.copytree(DATA / "mds" / source, folder / str(number))
        for entry in json.loads((folder / str(number) / "index.json").read_text())["shards"]:
            entry["raw_data"]["basename"] = f"{number}/{entry['raw_data']['basename']}"
            merged.append(entry)
        (folder / str(number) / "index.json").unlink()
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": merged}))


def _own(folder: Path) -> None:
    write_corpus(folder, [document for shard in SHARDS for document in shard], documents_per_shard=2)


DATA = Path(__file__).parent / "data"

FOLDERS = [
    *(
        Folder(
            example.folder,
            lambda folder, of=example.folder: shutil.copytree(DATA / of, folder, dirs_exist_ok=True),
            example.format,
            example.options,
            is_indexed=example.format not in ("nanogpt", "fms")
            and example.folder not in ("olmo/uint16", "olmo/uint32", "olmo/header", "parquet/datasets"),
        )
        for example in EXAMPLES
    ),
    Folder("four megatron", _megatron, "megatron"),
    Folder("four megatron, unsaid", _megatron, ""),
    Folder("four datatrove", _datatrove, "datatrove"),
    Folder("four datatrove, unsaid", _datatrove, ""),
    Folder("four olmo", _olmo, "olmo", ",dtype=uint16,eos_id=0"),
    Folder("four nanogpt", _nanogpt, "nanogpt", ",eos_id=0", is_indexed=False),
    Folder("four parquet", lambda folder: _parquet(folder, "train-%05d-of-00004-8f.parquet"), "parquet"),
    Folder("four parquet, unsaid", lambda folder: _parquet(folder, "train-%d-of-4.parquet"), ""),
    Folder("free parquet", lambda folder: _parquet(folder, "web-%d.parquet"), "parquet", is_indexed=False),
    Folder("four fms", _fms, "fms", is_indexed=False),
    Folder("four hf", _hf, "hf"),
    Folder("four hf, unsaid", _hf, ""),
    Folder("two splits of hf", lambda folder: _hf(folder, ("train", "test")), "hf"),
    Folder("merged mds", _mds, "mds"),
    Folder("merged mds, unsaid", _mds, ""),
    Folder("own", _own, ""),
]


def cases() -> Iterator[tuple[Folder, str]]:
    """Yield each folder with each thing that can happen to a file."""
    for folder in FOLDERS:
        for how in ("deleted", "renamed", "emptied"):
            yield folder, how

"""Tables of text that people have: Hugging Face datasets on disk, and MDS shards, sound and damaged."""

import gzip
import json
import pickle
import struct
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import CorpusError, UsageError
from penstock.data.corpus.open import open_corpus
from penstock.data.prepare.documents import Document, ReadOptions, check_text_column, read_records
from penstock.data.prepare.inputs import Selection, find_inputs

TEXTS = [f"text {n} 日本" * (n % 5) for n in range(200)]


def read(path: Path, column: str = "text", *, start: int = 0, limit: int = 10_000) -> list[tuple[int, str]]:
    """Return (index, text or kind of rejection) of every record of all files."""
    files, _ = find_inputs([str(path)], Selection())
    options = ReadOptions(text_column=column, max_document_bytes=limit)
    records = (record for file in files for record in read_records(file, options, start=start))
    return [(r.index, r.content.text if isinstance(r.content, Document) else r.content.kind) for r in records]


def write_mds(folder: Path, rows: list[dict[str, object]], kinds: dict[str, str], *, codec: str = "") -> Path:
    """Write one shard as MosaicML's library does (mosaicml/streaming, base/format/mds/writer.py)."""
    sizes = {"int": 8}
    encode = {
        "str": lambda value: value.encode() if isinstance(value, str) else value,
        "json": lambda value: json.dumps(value).encode(),
        "int": lambda value: np.int64(value).tobytes(),
        "pkl": pickle.dumps,
    }
    samples = []
    for row in rows:
        values = [(encode[kind](row[name]), sizes.get(kind)) for name, kind in kinds.items()]
        heads = b"".join(struct.pack("<I", len(value)) for value, size in values if size is None)
        samples.append(heads + b"".join(value for value, _ in values))
    config = {
        "column_names": list(kinds),
        "column_encodings": list(kinds.values()),
        "column_sizes": [sizes.get(kind) for kind in kinds.values()],
    }
    text = json.dumps(config, sort_keys=True).encode()
    offsets = np.cumsum([4 + 4 * (len(rows) + 1) + len(text), *map(len, samples)]).astype("<u4")
    content = struct.pack("<I", len(rows)) + offsets.tobytes() + text + b"".join(samples)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.json").write_text(json.dumps({"shards": [], "version": 2}))
    path = folder / f"shard.00000.mds{codec and '.'}{codec}"
    if codec == "gz":
        content = gzip.compress(content)
    elif codec:
        content = pa.compress(content, {"zstd": "zstd", "br": "brotli"}[codec], asbytes=True)
    path.write_bytes(content)
    return path


def mds_of(folder: Path, texts: list[str], **options: str) -> Path:
    rows = [{"id": n, "text": text} for n, text in enumerate(texts)]
    return write_mds(folder, rows, {"id": "int", "text": "str"}, **options)


def expected(texts: list[str]) -> list[tuple[int, str]]:
    return [(n, text or "empty") for n, text in enumerate(texts)]


def test_a_dataset_saved_to_disk_is_read_in_its_order_from_any_row(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"id": range(200), "text": TEXTS})
    saved.save_to_disk(tmp_path / "set", num_shards=3)
    files, _ = find_inputs([str(tmp_path / "set")], Selection())
    assert [Path(file.path).name for file in files] == [f"data-{n:05}-of-00003.arrow" for n in range(3)]
    assert [text for _, text in read(tmp_path / "set")] == [text or "empty" for text in TEXTS]
    first = Path(files[0].path)
    assert read(first, start=50) == read(first)[50:]


def test_of_a_dictionary_of_datasets_the_training_split_is_read(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("extra", "test", "train")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    assert read(tmp_path / "set") == [(0, "train")]


def test_texts_of_every_arrow_type_and_null_are_read(tmp_path: Path) -> None:
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(["once", None, "twice"], pa.string()).cast(kind)
        table = pa.table({"n": [1, 2, 3], "text": column})
        for new in (pa.ipc.new_stream, pa.ipc.new_file):
            path = tmp_path / "one.arrow"
            with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
                writer.write_table(table)
            assert read(path) == [(0, "once"), (1, "empty"), (2, "twice")]


def test_a_damaged_dataset_is_rejected_where_it_breaks_and_crashes_nothing(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "set")
    path = tmp_path / "set" / "data-00000-of-00001.arrow"
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    for size in generator.integers(0, len(content), 20).tolist():
        path.write_bytes(content[:size])
        assert all(
            kind in ("unreadable", "missing_field") or index < 200 for index, kind in read(path.parent)
        )
    for _ in range(200):
        altered = bytearray(content)
        altered[generator.integers(len(content))] = generator.integers(256)
        path.write_bytes(altered)
        assert len(read(path.parent)) <= 201


@pytest.mark.parametrize("codec", ["", "gz", "zstd", "br"])
def test_a_shard_of_mds_is_read_packed_or_not(tmp_path: Path, codec: str) -> None:
    path = mds_of(tmp_path / "set" / "train", TEXTS, codec=codec)
    mds_of(tmp_path / "set" / "val", ["held out"])
    assert read(tmp_path / "set") == expected(TEXTS)
    assert read(path, start=190) == expected(TEXTS)[190:]


def test_a_packed_copy_beside_its_shard_is_not_read_twice(tmp_path: Path) -> None:
    mds_of(tmp_path / "set", ["once"])
    mds_of(tmp_path / "set", ["once"], codec="zstd")
    assert read(tmp_path / "set") == [(0, "once")]


def test_a_value_of_mds_that_is_no_text_or_too_large_is_rejected_in_its_place(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": "a"}, {"text": b"\xff"}, {"text": "b" * 200}, {"text": "c"}]
    path = write_mds(tmp_path / "set", rows, {"text": "str"})
    assert read(path, limit=100) == [(0, "a"), (1, "undecodable"), (2, "too_large"), (3, "c")]


def test_a_damaged_shard_of_mds_is_one_rejection(tmp_path: Path) -> None:
    path = mds_of(tmp_path / "set", TEXTS[:20])
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        assert read(path) == [(0, "unreadable")]
    path = mds_of(tmp_path / "packed", TEXTS[:20], codec="zstd")
    path.write_bytes(path.read_bytes()[:-9])
    assert read(path) == [(0, "unreadable")]


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    rows: list[dict[str, object]] = [{"text": Trap(), "title": "fine"}]
    path = write_mds(tmp_path / "set", rows, {"text": "pkl", "title": "str"})
    files, _ = find_inputs([str(path)], Selection())
    with pytest.raises(UsageError, match=r"has: text \(pkl\), title \(str\).*--text-column title"):
        check_text_column(files, "text")
    assert read(path) == [(0, "not_text")]
    assert read(path, "title") == [(0, "fine")]
    assert not (tmp_path / "sprung").exists()


def test_the_columns_are_named_with_the_option_to_choose_one(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"id": [1], "body": ["b"], "a title": ["t"]}).save_to_disk(tmp_path / "set")
    files, _ = find_inputs([str(tmp_path / "set")], Selection())
    with pytest.raises(UsageError) as refused:
        check_text_column(files, "text")
    said = str(refused.value)
    assert "No Arrow input has a text column 'text'" in said
    assert "id (int64), body (string), a title (string)" in said
    assert "--text-column body, or --text-column 'a title'" in said
    check_text_column(files, "body")


def test_a_shard_of_texts_given_as_a_corpus_says_how_it_becomes_one(tmp_path: Path) -> None:
    mds_of(tmp_path / "set", ["once"])
    with pytest.raises(CorpusError, match=r"holds text \(text\).*penstock data prepare"):
        open_corpus(tmp_path / "set")


def test_a_text_that_is_stored_once_for_all_rows_is_in_memory_once(tmp_path: Path) -> None:
    text = "penstock " * (4 * 2**20 // 9)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array([text]))
    pq.write_table(pa.table({"text": column.cast(pa.string())}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 20 * 2**20
    pool = pa.default_memory_pool()
    del column
    held = pool.bytes_allocated()
    files, _ = find_inputs([str(tmp_path)], Selection())
    most = 0
    for file in files:
        for record in read_records(file, ReadOptions(text_column="text", max_document_bytes=2**30)):
            assert isinstance(record.content, Document)
            most = max(most, pool.bytes_allocated() - held)
    assert 0 < most < 64 * 2**20, "of 256"


def test_a_column_whose_name_is_no_utf_8_is_a_rejection(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "\u00e9\u00e9": ["b"]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace("\u00e9\u00e9".encode(), b"\xff\xff\xff\xff"))
    assert read(tmp_path) == [(0, "unreadable")]

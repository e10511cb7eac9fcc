"""Hugging Face datasets folders: lists of every kind, several batches, nulls, splits, damage."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.core.errors import CorpusError, UsageError
from penstock.data import open_corpus
from penstock.data.formats import TokenShard
from penstock.data.formats.arrow_folders import find_datasets, missing
from penstock.data.formats.ipc_tokens import open_lists
from penstock.data.prepare.inputs import Selection, find_inputs
from penstock.storage.base import LocalBlob, LocalStorage
from tests.format_examples import DATA, DOCUMENTS

ROWS = [[1, 2, 3], [], [4], [5, 6], [], [7]]
INDEX = {"state.json": 1, "dataset_info.json": 1}


def written(tmp_path: Path, columns: dict[str, Any], *, rows_per_batch: int, options: Any = None) -> Path:
    table = pa.table(columns)
    path = tmp_path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return path


def opened(path: Path, **options: str) -> TokenShard:
    return open_lists(LocalStorage(path.parent), path.name, options)


def documents_of(shard: TokenShard) -> list[list[int]]:
    ends = shard.document_ends(-1, shard.num_tokens)
    assert len(ends) == shard.num_documents
    return [part.tolist() for part in np.split(shard.tokens[0 : shard.num_tokens], ends)[:-1]]


@pytest.mark.parametrize("folder", ["empties", "nulls"])
def test_empty_lists_and_null_lists_are_empty_documents(folder: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "hf" / folder, tmp_path / "c")
    corpus = open_corpus(f"hf:{tmp_path / 'c'},column=input_ids")
    assert corpus.num_documents == len(DOCUMENTS) + 12
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [token for doc in DOCUMENTS for token in doc]
    lengths = np.diff(corpus.shard(0).document_ends(-1, corpus.num_tokens), prepend=0).tolist()
    assert [n for n in lengths if n] == [len(doc) for doc in DOCUMENTS]


def test_several_columns_of_lists_need_a_name() -> None:
    with pytest.raises(UsageError, match=r"several columns of lists of integers: input_ids, attention_mask"):
        opened(DATA / "hf" / "empties" / "data-00000-of-00001.arrow")


def test_lists_of_one_length_are_documents_of_that_length() -> None:
    shard = opened(DATA / "hf" / "fixed" / "data-00000-of-00001.arrow")
    assert documents_of(shard) == [doc[:8] for doc in DOCUMENTS if len(doc) >= 8]


@pytest.mark.parametrize("rows_per_batch", [1, 2, 4, 6])
@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int8())])
def test_rows_in_any_number_of_batches_are_the_same_documents(
    tmp_path: Path, kind: Any, rows_per_batch: int
) -> None:
    before = pa.array(
        [{"a": [n], "b": str(n)} for n in range(6)], pa.struct({"a": pa.list_(pa.int8()), "b": pa.string()})
    )
    columns = {"before": before, "n": pa.nulls(6), "tokens": pa.array(ROWS, kind)}
    shard = opened(written(tmp_path, columns, rows_per_batch=rows_per_batch))
    assert documents_of(shard) == ROWS
    ends = np.array([3, 3, 4, 6, 6, 7])
    for start in range(7):
        for stop in range(start, 8):
            expected = ends[(ends > start) & (ends <= stop)].tolist()
            assert shard.document_ends(start, stop).tolist() == expected


def test_tokens_of_four_bytes_are_read_in_place(tmp_path: Path) -> None:
    shard = opened(written(tmp_path, {"t": pa.array(ROWS, pa.list_(pa.uint32()))}, rows_per_batch=3))
    tokens = shard.tokens[0:3]
    assert not tokens.flags.owndata
    assert not tokens.flags.writeable


@pytest.mark.parametrize(
    ("rows_per_batch", "kind"), [(2, pa.list_(pa.int32())), (6, pa.large_list(pa.uint16()))]
)
def test_a_null_among_the_tokens_is_an_error_with_its_row(
    tmp_path: Path, rows_per_batch: int, kind: Any
) -> None:
    rows = pa.array([*ROWS[:3], [5, None], *ROWS[4:]], kind)
    with pytest.raises(CorpusError, match=r"data-00000.*has a null among the tokens of row 3"):
        opened(written(tmp_path, {"tokens": rows}, rows_per_batch=rows_per_batch))


def test_a_null_list_of_a_fixed_length_is_an_error_with_its_row(tmp_path: Path) -> None:
    rows = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    with pytest.raises(CorpusError, match="null among the tokens of row 1"):
        opened(written(tmp_path, {"tokens": rows}, rows_per_batch=3))


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_number_that_is_no_token_id_is_an_error_with_its_document(tmp_path: Path, value: int) -> None:
    rows = pa.array([[1], [], [2, value]], pa.list_(pa.int64()))
    shard = opened(written(tmp_path, {"tokens": rows}, rows_per_batch=2))
    with pytest.raises(CorpusError, match=rf"data-00000.*has token {value} in document 2"):
        shard.tokens[0:3]


def test_compressed_buffers_are_refused_by_name(tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    path = written(tmp_path, {"t": pa.array(ROWS, pa.list_(pa.int32()))}, rows_per_batch=9, options=options)
    with pytest.raises(CorpusError, match="its buffers are compressed"):
        opened(path)


@pytest.mark.parametrize(
    "before",
    [
        pa.array(["x" * 20] * 6, pa.string_view()),
        pa.array(["x", "y"] * 3).dictionary_encode(),
        pa.array([{"a": [b"x"], "b": None}] * 6),
        pa.UnionArray.from_dense(
            pa.array([0, 1] * 3, pa.int8()), pa.array([0, 0, 1, 1, 2, 2], pa.int32()), [pa.array([1] * 3)] * 2
        ),
    ],
    ids=lambda array: str(array.type)[:10],
)
@pytest.mark.parametrize("rows_per_batch", [2, 6])
def test_columns_of_any_type_may_lie_before_the_tokens(
    tmp_path: Path, before: Any, rows_per_batch: int
) -> None:
    columns = {"before": before, "t": pa.array(ROWS, pa.list_(pa.int32()))}
    assert documents_of(opened(written(tmp_path, columns, rows_per_batch=rows_per_batch))) == ROWS


class CountingStorage(LocalStorage):
    """A folder that counts the bytes that are read of it."""

    num_bytes = 0

    def open(self, name: str) -> LocalBlob:
        storage = self

        class CountingBlob(LocalBlob):
            def read(self, start: int, stop: int) -> bytes:
                storage.num_bytes += stop - start
                return super().read(start, stop)

            def array(self, dtype: Any, *, offset: int, count: int) -> Any:
                return CountingSlices(storage, super().array(dtype, offset=offset, count=count))

        return CountingBlob(self.folder / name)


class CountingSlices:
    def __init__(self, storage: CountingStorage, array: Any) -> None:
        self.storage, self.array = storage, array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: slice) -> Any:
        self.storage.num_bytes += self.array[part].nbytes
        return self.array[part]


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_opening_reads_the_metadata_of_batches_and_none_of_their_tokens(tmp_path: Path, new: Any) -> None:
    table = pa.table({"x": ["y" * 9999] * 40, "t": pa.array([list(range(9999))] * 40, pa.list_(pa.int32()))})
    path = tmp_path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    storage = CountingStorage(tmp_path)
    shard = open_lists(storage, path.name, {})
    assert path.stat().st_size > 1_900_000
    assert storage.num_bytes < 6000
    assert shard.tokens[9999 * 7 : 9999 * 7 + 5].tolist() == [0, 1, 2, 3, 4]


def test_text_is_no_column_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"holds text \(text\), not token ids"):
        opened(written(tmp_path, {"text": ["a", "b"]}, rows_per_batch=9))


def test_a_truncated_stream_is_an_error_wherever_it_is_cut(tmp_path: Path) -> None:
    path = written(tmp_path, {"t": pa.array(ROWS, pa.list_(pa.int32()))}, rows_per_batch=2)
    content = path.read_bytes()
    for size in range(0, len(content) - 1, 4):  # the length in the mark of the end is 0 as well as absent
        path.write_bytes(content[:size])
        with pytest.raises(CorpusError, match=r"data-00000-of-00001\.arrow cannot be read"):
            opened(path)


def test_the_files_of_the_training_split_are_found_in_their_order() -> None:
    files = {f"data-{n:05}-of-00003.arrow": 9 for n in range(3)}
    assert find_datasets(files) == []
    assert find_datasets(files | INDEX) == list(files)
    assert find_datasets({"dataset.arrow": 1, "cache-1.arrow": 1} | INDEX) == ["dataset.arrow"]
    split = {f"{name}/{file}": 9 for name in ("train", "test") for file in (*files, *INDEX)}
    assert find_datasets(split) == [f"train/{file}" for file in files]


def test_a_missing_file_of_a_dataset_is_an_error(tmp_path: Path) -> None:
    files = {f"data-{n:05}-of-00003.arrow": 9 for n in (0, 2)} | INDEX
    (tmp_path / "state.json").write_text('{"_data_files": []}')  # a state that tells of none
    assert list(missing(LocalStorage(tmp_path), files, find_datasets(files))) == ["data-00001-of-00003.arrow"]
    (tmp_path / "state.json").write_text('{"_data_files"')
    with pytest.raises(CorpusError, match=r"state\.json is no state of a dataset.*restore it"):
        list(missing(LocalStorage(tmp_path), files, find_datasets(files)))


SELECTIONS = {
    "datasets 2": {"_indices_files": [{"filename": "indices.arrow"}]},
    "datasets 1": {"_indices_data_files": [{"filename": "cache-1-indices.arrow"}]},
    "part of a file": {"_data_files": [{"filename": "data-00000-of-00001.arrow", "skip": 2, "take": 3}]},
    "a mapping alone": {},
}


@pytest.mark.parametrize("split", ["", "train"])
@pytest.mark.parametrize("kind", SELECTIONS)
def test_a_dataset_that_selects_rows_of_its_files_is_refused(tmp_path: Path, kind: str, split: str) -> None:
    folder = shutil.copytree(DATA / "hf" / "fixed", tmp_path / "c" / split)
    state = json.loads((folder / "state.json").read_text()) | SELECTIONS[kind]
    (folder / "state.json").write_text(json.dumps(state))
    texts = pa.table({"text": ["a", "b"]})
    path = str(folder / "data-00000-of-00001.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, texts.schema) as writer:
        writer.write_table(texts)
    if kind in ("datasets 2", "a mapping alone"):
        (folder / "indices.arrow").write_bytes(b"")
    if split:
        (tmp_path / "c" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    said = (
        r"state\.json takes a part of data-0"
        if kind == "part of a file"
        else "_indices_|it has indices.arrow"
    )
    with pytest.raises(CorpusError, match=rf"is a selection of the rows .*({said}).*flatten_indices"):
        open_corpus(f"hf:{tmp_path / 'c'}")
    for path in (tmp_path / "c", folder / "data-00000-of-00001.arrow"):
        with pytest.raises(CorpusError, match=rf"is a selection of the rows .*({said}).*flatten_indices"):
            find_inputs([str(path)], Selection())


@pytest.mark.parametrize("more", [{}, {"_indices_files": None}, {"_indices_data_files": []}])
def test_a_dataset_of_all_rows_is_read(tmp_path: Path, more: dict[str, Any]) -> None:
    folder = shutil.copytree(DATA / "hf" / "fixed", tmp_path / "c")
    state = json.loads((folder / "state.json").read_text()) | more
    (folder / "state.json").write_text(json.dumps(state))
    assert open_corpus(f"hf:{folder},column=input_ids").num_documents

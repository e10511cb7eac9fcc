"""Hugging Face datasets folders: lists of every kind, several batches, nulls, splits, damage."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.format_examples import DATA, DOCUMENTS

from penstock.core.errors import CorpusError, UsageError
from penstock.data import open_corpus
from penstock.data.formats.hf_datasets import find, open_shard
from penstock.data.formats.runs import RunShard
from penstock.data.storage import LocalStorage

ROWS = [[1, 2, 3], [], [4], [5, 6], [], [7]]
INDEX = {"state.json": 1, "dataset_info.json": 1}


def written(tmp_path: Path, columns: dict[str, Any], *, rows_per_batch: int, options: Any = None) -> Path:
    table = pa.table(columns)
    path = tmp_path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return path


def opened(path: Path, **options: str) -> RunShard:
    return open_shard(LocalStorage(path.parent), path.name, options)


def documents_of(shard: RunShard) -> list[list[int]]:
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


def test_a_column_that_hides_where_the_tokens_lie_is_refused_by_its_type(tmp_path: Path) -> None:
    columns = {"text": pa.array(["x"] * 6, pa.string_view()), "t": pa.array(ROWS, pa.list_(pa.int32()))}
    with pytest.raises(CorpusError, match="column of type string_view lies before the column of tokens"):
        opened(written(tmp_path, columns, rows_per_batch=9))


def test_text_is_no_column_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="has no column of lists of integers"):
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
    assert find(files) == []
    assert find(files | INDEX) == list(files)
    assert find({"dataset.arrow": 1, "cache-1.arrow": 1} | INDEX) == ["dataset.arrow"]
    split = {f"{name}/{file}": 9 for name in ("train", "test") for file in (*files, *INDEX)}
    assert find(split) == [f"train/{file}" for file in files]


def test_a_missing_file_of_a_dataset_is_an_error() -> None:
    files = {f"data-{n:05}-of-00003.arrow": 9 for n in (0, 2)}
    with pytest.raises(CorpusError, match=r"holds data-00002-of-00003\.arrow has 2 of its 3 files"):
        find(files | INDEX)

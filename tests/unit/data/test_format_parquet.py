"""Parquet: row groups decoded on demand, counts from the footer, nulls, damage."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import CorpusError, UsageError
from penstock.data import open_corpus
from penstock.data.formats import TokenShard, parquet_groups
from penstock.data.formats.damaged import Malformed
from penstock.data.formats.decoded import Decoded
from penstock.data.formats.parquet import find, open_shard
from penstock.data.formats.parquet_footer import group_counts
from penstock.storage.base import LocalStorage
from tests.format_examples import DATA, DOCUMENTS

ROWS = [[1, 2, 3], [], [4], [5, 6], [], [7]]
ENDS = [3, 3, 4, 6, 6, 7]


@pytest.fixture(autouse=True)
def decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoded:
    """What is decoded in this test alone."""
    held = Decoded(tmp_path / "decoded")
    monkeypatch.setattr(parquet_groups, "DECODED", held)
    return held


def written(tmp_path: Path, rows: list[Any], kind: Any, *, group: int = 2, **options: Any) -> Path:
    path = tmp_path / "part.parquet"
    table = pa.table({"text": ["x"] * len(rows), "tokens": pa.array(rows, kind)})
    pq.write_table(table, path, row_group_size=group, **options)
    return path


def opened(path: Path, **options: str) -> TokenShard:
    return open_shard(LocalStorage(path.parent), path.name, options)


def documents_of(shard: TokenShard) -> list[list[int]]:
    ends = shard.document_ends(-1, shard.num_tokens)
    assert len(ends) == shard.num_documents
    return [part.tolist() for part in np.split(shard.tokens[0 : shard.num_tokens], ends)[:-1]]


@pytest.mark.parametrize("folder", ["empties", "nulls"])
def test_empty_lists_and_null_lists_are_empty_documents(folder: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "parquet" / folder, tmp_path / "c")
    corpus = open_corpus(tmp_path / "c")
    assert corpus.num_documents == len(DOCUMENTS) + 12
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [token for doc in DOCUMENTS for token in doc]


@pytest.mark.parametrize("group", [1, 2, 4, 6])
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.uint32())])
def test_row_groups_of_any_size_are_the_same_documents(
    tmp_path: Path, kind: Any, statistics: bool, group: int
) -> None:
    shard = opened(written(tmp_path, ROWS, kind, group=group, write_statistics=statistics))
    assert documents_of(shard) == ROWS
    for start in range(7):
        for stop in range(start, 8):
            assert shard.tokens[start:stop].tolist() == list(range(start + 1, min(stop, 7) + 1))
            expected = [end for end in ENDS if start < end <= stop]
            assert shard.document_ends(start, stop).tolist() == expected


def test_lists_of_one_length_are_documents_of_that_length(tmp_path: Path) -> None:
    rows = [[1, 2], [3, 4], [5, 6]]
    assert documents_of(opened(written(tmp_path, rows, pa.list_(pa.int32(), 2)))) == rows


def test_opening_decodes_nothing_and_a_slice_decodes_its_row_group_alone(
    tmp_path: Path, decoded: Decoded
) -> None:
    shard = opened(written(tmp_path, ROWS, pa.list_(pa.int32())))
    assert (shard.num_tokens, shard.num_documents) == (7, 6)
    assert not (tmp_path / "decoded").exists()
    assert shard.tokens[4:5].tolist() == [5]
    assert not shard.tokens[4:5].flags.owndata
    assert not shard.tokens[4:5].flags.writeable
    assert len(decoded._held) == 1


def test_a_file_without_rows_has_no_tokens(tmp_path: Path) -> None:
    assert documents_of(opened(written(tmp_path, [], pa.list_(pa.int32())))) == []


def test_threads_read_the_same_tokens(tmp_path: Path) -> None:
    rows = [list(range(n, n + n % 7)) for n in range(500)]
    shard = opened(written(tmp_path, rows, pa.list_(pa.int32()), group=10))
    whole = [token for row in rows for token in row]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda n: shard.tokens[n * 7 : n * 7 + 30].tolist(), range(200))
        assert list(found) == [whole[n * 7 : n * 7 + 30] for n in range(200)]


def test_a_null_among_the_tokens_is_an_error_with_its_row(tmp_path: Path) -> None:
    shard = opened(written(tmp_path, [*ROWS[:3], [5, None], [6]], pa.list_(pa.int32())))
    with pytest.raises(CorpusError, match=r"part\.parquet has a null among the tokens of row 3"):
        shard.tokens[0 : shard.num_tokens]


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_number_that_is_no_token_id_is_an_error_with_its_row(tmp_path: Path, value: int) -> None:
    shard = opened(written(tmp_path, [[1], [], [2], [3, value]], pa.list_(pa.int64())))
    assert shard.tokens[0:1].tolist() == [1]
    with pytest.raises(CorpusError, match=rf"part\.parquet has token {value} in row 3"):
        shard.tokens[0:4]


def test_a_column_that_is_not_clear_is_an_error_with_the_candidates(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"ids": [[1]], "mask": [[2]], "text": ["x"]}), path)
    assert documents_of(opened(path, column="mask")) == [[2]]
    with pytest.raises(UsageError, match="several columns of lists of integers: ids, mask"):
        opened(path)
    pq.write_table(pa.table({"mask": [1.5]}), path)
    with pytest.raises(CorpusError, match="no column of lists of integers"):
        opened(path)


def test_a_file_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS, pa.list_(pa.int32()))
    content = path.read_bytes()
    for size in range(0, len(content), 41):
        path.write_bytes(content[:size])
        with pytest.raises(CorpusError, match=r"part\.parquet cannot be read"):
            opened(path)


def test_damage_inside_a_row_group_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    rows = [list(range(n, n + 90)) for n in range(40)]
    path = written(tmp_path, rows, pa.list_(pa.int32()), group=20, compression="zstd")
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)
    shard = opened(path)
    assert shard.tokens[0:90].tolist() == rows[0]
    with pytest.raises(CorpusError, match=r"part\.parquet"):
        shard.tokens[shard.num_tokens - 1 : shard.num_tokens]


def test_files_are_found_and_those_of_the_training_split_chosen_where_names_tell() -> None:
    assert find({"b.parquet": 1, "a.parquet": 1, "x.csv": 1}) == ["a.parquet", "b.parquet"]
    files = {f"{split}-{n:05}-of-00002.parquet": 1 for split in ("test", "train") for n in range(2)}
    assert find(files) == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    with pytest.raises(UsageError, match="2 splits"):
        find({name.replace("train", "dev"): 1 for name in files})


def test_the_counts_of_the_footer_are_those_that_pyarrow_reads(tmp_path: Path) -> None:
    path = written(tmp_path, [*ROWS, None], pa.list_(pa.int32()))
    metadata = pq.ParquetFile(path).metadata
    counts = group_counts(LocalStorage(tmp_path).open("part.parquet"), "tokens")
    for number, found in enumerate(counts):
        stored = metadata.row_group(number).column(1)
        assert found.rows == metadata.row_group(number).num_rows
        assert (found.values, found.nulls) == (stored.num_values, stored.statistics.null_count)


@pytest.mark.parametrize(
    ("footer", "message"),
    [
        (b"", "footer is cut off"),
        (b"\x00", "footer is damaged"),
        (b"\x49\xfc\xff\xff\xff\x0f", "footer is cut off"),
        (b"\x16" + b"\xff" * 11, "a number of more than 64 bits"),
        (b"\x1f", "unknown kind 15"),
        (b"\x1c" * 100, "nested too deeply"),
        (
            b"\x49\x1c\x19\x1c\x3c\x39\x18\x06tokens\x26\x02\x00\x00\x28\x01x\x00\x00",
            "a count that cannot be",
        ),
    ],
)
def test_a_footer_that_makes_no_sense_is_an_error(tmp_path: Path, footer: bytes, message: str) -> None:
    path = tmp_path / "part.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(Malformed, match=message):
        group_counts(LocalStorage(tmp_path).open(path.name), "tokens")
    with pytest.raises(CorpusError, match=r"part\.parquet cannot be read"):
        opened(path)

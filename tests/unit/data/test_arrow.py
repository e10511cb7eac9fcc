"""The Arrow shard: opens in plain pyarrow, reads in place, refuses what is not one."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.core.errors import CorpusError
from penstock.data.formats import TokenShard
from penstock.data.formats.arrow import open_shard as open_in
from penstock.data.formats.arrow import write_shard
from penstock.storage.base import LocalStorage

TOKENS = np.arange(10, dtype=np.uint16)
OFFSETS = np.array([0, 3, 3, 4, 10], np.int64)


def open_shard(path: Path) -> TokenShard:
    return open_in(LocalStorage(path.parent), path.name, {})


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.arrow"
    write_shard(path, TOKENS, OFFSETS)
    return path


def test_plain_pyarrow_reads_the_documents(shard: Path) -> None:
    with pa.memory_map(str(shard)) as source:
        table = pa.ipc.open_file(source).read_all()
        lists = table["tokens"].to_pylist()
    assert table.schema.field("tokens").type == pa.large_list(pa.uint16())
    assert lists == [[0, 1, 2], [], [3], [4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_tokens_come_back_in_their_type_and_read_only(tmp_path: Path, dtype: type) -> None:
    write_shard(tmp_path / "s.arrow", TOKENS.astype(dtype), OFFSETS)
    opened = open_shard(tmp_path / "s.arrow")
    assert opened.tokens[2:5].tolist() == [2, 3, 4]
    assert opened.tokens[0:10].dtype == dtype
    assert not opened.tokens[0:10].flags.writeable


def test_document_ends_are_those_in_the_range_and_repeat_for_empty_documents(shard: Path) -> None:
    opened = open_shard(shard)
    assert opened.document_ends(0, 10).tolist() == [3, 3, 4, 10]
    assert opened.document_ends(3, 9).tolist() == [4]
    assert opened.document_ends(4, 9).tolist() == []


def test_the_same_tokens_give_the_same_bytes(shard: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "again.arrow", TOKENS.copy(), OFFSETS.copy())
    assert (tmp_path / "again.arrow").read_bytes() == shard.read_bytes()


def test_a_shard_without_documents_is_possible(tmp_path: Path) -> None:
    write_shard(tmp_path / "s.arrow", TOKENS[:0], OFFSETS[:1])
    assert (open_shard(tmp_path / "s.arrow").num_tokens, open_shard(tmp_path / "s.arrow").num_documents) == (
        0,
        0,
    )


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_shard_is_an_error(shard: Path, size: int) -> None:
    os.truncate(shard, size % shard.stat().st_size)
    with pytest.raises(CorpusError, match=r"shard\.arrow cannot be read.*restore it or make it again"):
        open_shard(shard)


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"absent\.arrow is missing"):
        open_shard(tmp_path / "absent.arrow")


def test_an_arrow_file_of_another_shape_is_an_error(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": [1, 2]})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(CorpusError, match="expected one record batch"):
        open_shard(tmp_path / "x.arrow")

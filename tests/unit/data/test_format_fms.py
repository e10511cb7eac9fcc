"""fms-fsdp's Arrow files: a batch a document, many of them, empty ones, damaged ones."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.format_examples import DATA, DOCUMENTS

from penstock.core.errors import CorpusError, UsageError
from penstock.data import open_corpus
from penstock.data.formats.fms import find, open_shard
from penstock.data.formats.runs import RunShard
from penstock.data.storage import LocalStorage

DOCS = [[1, 2, 3], [], [4], [5, 6]]


def written(
    path: Path, docs: list[list[int | None]], *, dtype: str = "uint32", new: Any = pa.ipc.new_file
) -> Path:
    schema = pa.schema([("id", pa.string()), ("tokens", pa.type_for_alias(dtype))])
    with pa.OSFile(str(path), "wb") as sink, new(sink, schema) as writer:
        for doc in docs:
            writer.write(pa.record_batch([["x"] * len(doc), pa.array(doc, schema.field(1).type)], schema))
    return path


def opened(path: Path, **options: str) -> RunShard:
    return open_shard(LocalStorage(path.parent), path.name, options)


def documents_of(shard: RunShard) -> list[list[int]]:
    ends = shard.document_ends(-1, shard.num_tokens)
    assert len(ends) == shard.num_documents
    return [part.tolist() for part in np.split(shard.tokens[0 : shard.num_tokens], ends)[:-1]]


def test_empty_batches_are_empty_documents(tmp_path: Path) -> None:
    shutil.copytree(DATA / "fms" / "empties", tmp_path / "c")
    corpus = open_corpus(tmp_path / "c")
    assert corpus.num_documents == len(DOCUMENTS) + 12
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [token for doc in DOCUMENTS for token in doc]


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_each_batch_is_a_document(tmp_path: Path, dtype: str, new: Any) -> None:
    shard = opened(written(tmp_path / "a.arrow", DOCS, dtype=dtype, new=new))
    assert documents_of(shard) == DOCS
    assert shard.document_ends(0, 6).tolist() == [3, 3, 4, 6]
    assert str(shard.tokens[0:0].dtype) == ("uint16" if dtype == "uint16" else "uint32")


def test_a_document_is_read_in_place_among_many(tmp_path: Path) -> None:
    docs: list[list[int | None]] = [[n] * (n % 5) for n in range(3000)]
    shard = opened(written(tmp_path / "a.arrow", docs))
    assert documents_of(shard) == docs
    place = sum(n % 5 for n in range(2004))
    assert shard.tokens[place : place + 4].tolist() == [2004] * 4
    assert not shard.tokens[place : place + 4].flags.owndata


def test_a_file_without_batches_has_no_tokens(tmp_path: Path) -> None:
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        assert documents_of(opened(written(tmp_path / "a.arrow", [], new=new))) == []


def test_a_null_token_is_an_error_with_its_document(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"a\.arrow has a null among the tokens of document 1"):
        opened(written(tmp_path / "a.arrow", [[1], [2, None], [3]]))


def test_a_negative_token_is_an_error_with_its_document(tmp_path: Path) -> None:
    shard = opened(written(tmp_path / "a.arrow", [[1], [], [2, -7]], dtype="int32"))
    with pytest.raises(CorpusError, match=r"a\.arrow has token -7 in document 2"):
        shard.tokens[0:3]


def test_a_column_of_another_name_is_named(tmp_path: Path) -> None:
    batch = pa.record_batch({"ids": [1, 2], "types": [3, 4]})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write(batch)
    assert documents_of(opened(path, column="types")) == [[3, 4]]
    with pytest.raises(UsageError, match="several columns of integers: ids, types"):
        opened(path)


def test_a_file_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.arrow", DOCS)
    content = path.read_bytes()
    for size in range(0, len(content), 11):
        path.write_bytes(content[:size])
        with pytest.raises(CorpusError, match=r"a\.arrow cannot be read"):
            opened(path)


def test_what_is_no_arrow_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"\xff" * 4096)
    with pytest.raises(CorpusError, match="there is no Arrow message at byte 0"):
        opened(tmp_path / "a.arrow")


def test_files_are_found_unless_hugging_face_wrote_them() -> None:
    assert find({"b/x.arrow": 1, "a/x.arrow": 1, "meta.csv": 1}) == ["a/x.arrow", "b/x.arrow"]
    assert find({"data-00000-of-00001.arrow": 1, "state.json": 1}) == []
